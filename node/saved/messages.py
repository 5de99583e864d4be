"""What a holder of fragments is asked, and its answers: MessagePack arrays `[tag, field...]` behind a u32 length.

One stream is one conversation; the process that opened it asks, one question at a time. Two may ask: the seed, whose
key the transport proves, and a process that shows a pass which the swarm's key has signed for it.

    Show(pass)                        --> Done | Refused
    AskHeld                           --> Held
    Place(record, fragment, whole)    --> Send(from segment) | Done | Refused;  after Send: the bytes --> Done | Refused
    Settle(serial)                    --> Done
    Fetch(serial, fragment, segment)  --> Body(size), then the bytes | Refused
    AskVersion                        --> Version
    FetchBlob(kind, name)             --> Body(size), then the bytes | Refused
    FetchBlock(root, block)           --> Body(size), then the bytes | Refused
"""

from typing import Annotated, Final

import msgspec

from codec.errors import PeerError
from codec.sign import Key, open_sealed
from codec.unpack import unpack
from node.saved.record import MAX_HOLDERS, MAX_RECORD_BYTES, MAX_SEGMENTS
from swarm.protocol.core.wire import MAX_DOCUMENT

__all__ = [
    "MAX_ANSWER_BYTES",
    "MAX_PASS_BYTES",
    "MAX_QUESTION_BYTES",
    "NEAR",
    "STATES_HELD",
    "AskHeld",
    "AskVersion",
    "Body",
    "Done",
    "Fetch",
    "FetchBlob",
    "FetchBlock",
    "Held",
    "HeldState",
    "Message",
    "NodeAddress",
    "Place",
    "Refused",
    "Send",
    "Settle",
    "Show",
    "Version",
    "decode",
    "encode",
    "open_pass",
    "seal_pass",
]

STATES_HELD: Final = 3
"""States of which a node may hold fragments: the one that is being placed, the last whole one, and one before it where
this node has not heard yet that the last one is whole."""
NEAR: Final = 48
"""Other nodes that a holder names: twice the holders of a state."""
MAX_QUESTION_BYTES: Final = MAX_RECORD_BYTES + 1024
MAX_ANSWER_BYTES: Final = MAX_DOCUMENT + 1024
"""Of a version's manifest; `Held` has half of it."""
assert MAX_ANSWER_BYTES > STATES_HELD * (MAX_RECORD_BYTES + 1024) + NEAR * 5120
MAX_PASS_BYTES: Final = 1024
"""Of a `Show`."""
_PASS_DOMAIN: Final = b"swarm-node rescue pass 1"

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Sealed = Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
FragmentNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_HOLDERS)]
Segment = Annotated[int, msgspec.Meta(ge=0, le=MAX_SEGMENTS)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Root of all questions and answers."""


class Show(Message, frozen=True, tag=1):
    """A pass of this process: see `seal_pass`."""

    sealed: Annotated[bytes, msgspec.Meta(max_length=512)]


class AskHeld(Message, frozen=True, tag=2):
    """Which fragments do you hold, and which nodes do you know?"""


class Place(Message, frozen=True, tag=3):
    """From the seed: hold this fragment of the state with this record. `whole`: the serial of the last state that is
    placed whole, which stays until this one is; 0: the seed knows of none."""

    record: Sealed
    fragment: FragmentNumber
    whole: U63


class Settle(Message, frozen=True, tag=4):
    """From the seed: the state with this serial is placed whole. Keep it; those before it are not needed any more."""

    serial: U63


class Fetch(Message, frozen=True, tag=5):
    """Send me this segment."""

    serial: U63
    fragment: FragmentNumber
    segment: Segment


class AskVersion(Message, frozen=True, tag=6):
    """Which version do you hold?"""


class FetchBlob(Message, frozen=True, tag=7):
    """Send me this layout, file or hash list: as `swarm.protocol.core.wire.WantBlob`."""

    kind: Annotated[int, msgspec.Meta(ge=1, le=3)]
    name: Key32


class FetchBlock(Message, frozen=True, tag=8):
    """Send me this block of the version with this root."""

    root: Key32
    block: U63


class HeldState(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fragments of one state that a node has whole."""

    record: Sealed
    fragments: Annotated[tuple[FragmentNumber, ...], msgspec.Meta(max_length=MAX_HOLDERS)]


class NodeAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A node, and where it can be dialed."""

    peer: Key32
    addrs: Annotated[
        tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=256)], ...], msgspec.Meta(max_length=16)
    ]


class Held(Message, frozen=True, tag=9):
    """Answer to `AskHeld`. `near`: nodes of the roster in the order of `placement.order_of`."""

    states: Annotated[tuple[HeldState, ...], msgspec.Meta(max_length=STATES_HELD)]
    near: Annotated[tuple[NodeAddress, ...], msgspec.Meta(max_length=NEAR)]


class Send(Message, frozen=True, tag=10):
    """Send the fragment's bytes from this segment on: those before it are here."""

    segment: Segment


class Done(Message, frozen=True, tag=11):
    """It is done, durably."""


class Refused(Message, frozen=True, tag=12):
    """No, and why, for people."""

    why: Annotated[str, msgspec.Meta(max_length=512)]


class Body(Message, frozen=True, tag=13):
    """So many bytes follow."""

    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 42)]


class Version(Message, frozen=True, tag=14):
    """Answer to `AskVersion`: the sealed manifest; empty: none is held."""

    manifest: Annotated[bytes, msgspec.Meta(max_length=MAX_DOCUMENT)]


_ALL = (
    Show | AskHeld | Place | Settle | Fetch | AskVersion | FetchBlob | FetchBlock
    | Held | Send | Done | Refused | Body | Version
)  # fmt: skip
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_ALL)


def encode(message: Message) -> bytes:
    """`message` as it travels, without its length."""
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Exactly one well-formed message. Raises `PeerError`."""
    return unpack(_decoder, data, "saved state")


class _Pass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    swarm: Key32
    peer: Key32
    expires: float


_pass_decoder = msgspec.msgpack.Decoder(_Pass)


def seal_pass(key: Key, peer: bytes, expires: float) -> bytes:
    """A pass for the process with the transport key `peer`: it may fetch what nodes hold, until `expires` (Unix time).

    `key`: the swarm's. Only its holder could read a state anyway, so nobody else needs one: an old ticket, or that of a
    machine that was removed, opens nothing.
    """
    return key.seal(_PASS_DOMAIN, _encoder.encode(_Pass(key.public, peer, expires)))


def open_pass(sealed: bytes, swarm: bytes, peer: bytes, now: float) -> None:
    """Raise `PeerError` unless this is a pass of `swarm` for `peer` that has not expired. `now`: Unix time."""
    found = unpack(_pass_decoder, open_sealed(swarm, _PASS_DOMAIN, sealed), "pass")
    if found.swarm != swarm or found.peer != peer:
        raise PeerError("pass: for another process or swarm")
    if not now <= found.expires:
        raise PeerError("pass: it has expired")
