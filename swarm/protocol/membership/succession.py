"""How a swarm gets a new key: its old key signs where the new one is, and members pass that on and follow.

A succession names the new swarm's key, addresses, and a capability of it: all that a new ticket says. So a member that
has seen it can leave the old swarm and come into the new one without a person. It is worth nothing to others: the
capability is for the peers that the old swarm knew (`Tickets.reserve`).

It goes to every member that has a session with the authority, and from each that hears it first to all its neighbours.
The first one counts: whoever has the old key can sign another, and nothing could tell them apart.
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
"""As the message that carries it: four addresses, a capability and two keys are half of that."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Successor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The swarm that takes the place of another."""

    swarm: Key32
    """The old one, whose key signs this."""
    successor: Key32
    """Public key of the new one."""
    addrs: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...], msgspec.Meta(min_length=1, max_length=4)
    ]
    capability: Annotated[bytes, msgspec.Meta(min_length=1, max_length=1024)]
    """Sealed by the new key."""
    preset: Literal["wan", "lan", "loopback"]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Successor)


def seal_successor(document: Successor, old: Key) -> bytes:
    """The document signed by the old swarm's key, as it travels. `ValueError` when it is not that swarm's."""
    if document.swarm != old.public:
        raise ValueError("a succession is signed by the key of the swarm that it ends")
    return old.seal(_DOMAIN, _encoder.encode(document))


def open_successor(sealed: bytes, swarm: bytes) -> Successor:
    """Verify, then decode. `PeerError` when `swarm` did not sign it, or it names another swarm or itself."""
    if len(sealed) > _MAX_BYTES:
        raise PeerError(f"succession: {len(sealed)} bytes")
    document = unpack(_decoder, open_sealed(swarm, _DOMAIN, sealed), "succession")
    if document.swarm != swarm or document.successor == swarm:
        raise PeerError("succession: of another swarm")
    return document


class SuccessionRelay:
    """A member's part: hear it once, pass it on, tell the face."""

    def __init__(self, state: State) -> None:
        self._state = state

    def heard(self, peer: bytes, message: Succession) -> None:
        """From anybody, for the signature alone counts. `PeerError` when it is forged."""
        state = self._state
        if state.succession:
            return
        open_successor(message.sealed, state.swarm)
        state.succession = message.sealed
        for session in state.sessions:
            if session.ready and session.peer != peer:
                state.outbox.send(session.peer, message)
        state.outbox.notify(SuccessionHeard(message.sealed))
