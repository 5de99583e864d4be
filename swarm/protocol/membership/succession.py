"""Successions: how a swarm gets a new key. The old key signs a document that names the new one, and members follow it.

A succession holds the new swarm's key, addresses and a capability: the content of a ticket. So a member that gets it
can leave the old swarm and join the new one without human help. Other peers cannot use it: the capability is reserved
for the peers that the old swarm knew (`Tickets.reserve`).

The authority sends it to every member that has a session with it, and each member forwards it to all its neighbours
when it first hears it. The first succession counts: the holder of the old key could sign another, and members could not
tell which is right.
"""

from typing import Annotated, Final, Literal

import msgspec

from codec.errors import PeerError
from codec.sign import Key, open_sealed
from codec.unpack import unpack
from swarm.protocol.core.notices import SuccessionHeard
from swarm.protocol.core.wire import Succession
from swarm.protocol.state import State

__all__ = ["SuccessionRelay", "Successor", "open_successor", "seal_successor"]

_DOMAIN: Final = b"swarm-node succession 1"
_MAX_BYTES: Final = 4096
"""As the message that carries it; four addresses, a capability and two keys take half of that."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Successor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The swarm that replaces another."""

    swarm: Key32
    """The public key of the old swarm, which signs this."""
    successor: Key32
    """The public key of the new swarm."""
    addrs: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...], msgspec.Meta(min_length=1, max_length=4)
    ]
    capability: Annotated[bytes, msgspec.Meta(min_length=1, max_length=1024)]
    """Sealed by the new key."""
    preset: Literal["wan", "lan", "loopback"]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Successor)


def seal_successor(document: Successor, old: Key) -> bytes:
    """The document, signed by the old swarm's key. Raises `ValueError` if it names another old swarm."""
    if document.swarm != old.public:
        raise ValueError("a succession is signed by the key of the swarm that it ends")
    return old.seal(_DOMAIN, _encoder.encode(document))


def open_successor(sealed: bytes, swarm: bytes) -> Successor:
    """Verify and decode. Raises `PeerError` if `swarm` did not sign it, or it names another old swarm or itself."""
    if len(sealed) > _MAX_BYTES:
        raise PeerError(f"succession: {len(sealed)} bytes")
    document = unpack(_decoder, open_sealed(swarm, _DOMAIN, sealed), "succession")
    if document.swarm != swarm or document.successor == swarm:
        raise PeerError("succession: belongs to another swarm")
    return document


class SuccessionRelay:
    """A member's part: take the first succession, forward it, and tell the application."""

    def __init__(self, state: State) -> None:
        self._state = state

    def heard(self, peer: bytes, message: Succession) -> None:
        """Take a succession from any peer, since only the signature counts. Raises `PeerError` if it is forged."""
        state = self._state
        if state.succession:
            return
        open_successor(message.sealed, state.swarm)
        state.succession = message.sealed
        for session in state.sessions:
            if session.ready and session.peer != peer:
                state.outbox.send(session.peer, message)
        state.outbox.notify(SuccessionHeard(message.sealed))
