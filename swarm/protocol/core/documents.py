"""The documents that membership hangs on, as they are signed and travel.

- `Capability` (in a ticket): the right to join, until it expires, for so many nodes.
- `Grant`: the lease of one peer on one slot, with a fencing serial: of two grants for a slot the higher serial counts.
- `Heartbeat`: the authority's clock and its word on which slots live; small, frequent, down all trees.
- `Report`: a member's renewal. It re-signs nothing of the authority's: it is signed by the member over the hash of the
  last heartbeat it saw, so nobody can forge one, replay an old one or keep the dead alive. It also says what the member
  holds.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NewType

import msgspec
from blake3 import blake3

from codec.errors import PeerError
from codec.sign import SIGNATURE_BYTES, Key, open_sealed
from codec.unpack import unpack
from swarm.protocol.core.version import VersionId

__all__ = [
    "MAX_LINKS",
    "MAX_SLOTS",
    "MAX_UPLOADS",
    "UNTIMED",
    "AuthorityTime",
    "Capability",
    "Grant",
    "Heartbeat",
    "Link",
    "Report",
    "bit_set",
    "claimed_reporter",
    "has_bit",
    "heartbeat_hash",
    "open_capability",
    "open_grant",
    "open_heartbeat",
    "open_report",
    "seal",
]

AuthorityTime = NewType("AuthorityTime", float)
"""Seconds of the authority's clock (Unix time as the authority knows it). Never compared with local time."""

Key32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Of the authority's clock. The bounds keep NaN and infinity out of arithmetic, too."""
Slots = Annotated[bytes, msgspec.Meta(max_length=2080)]
MAX_SLOTS = 2048 * 8
Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
MAX_LINKS = 32
"""Neighbours in one report: twice as many as there are stripes on either side, and then some."""
MAX_UPLOADS = 16
"""Peers in one report to which blocks were given; with more, the others' turn is next time."""


class Capability(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right to join."""

    swarm: Key32
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    expires: Time
    """Authority time."""
    nodes: U32
    """How many peers may have a lease by it at a time."""
    quota_bytes: U63
    """How much they may fetch in all while catching up; 0: no limit."""
    nodes_ever: U32 = 0
    """How many different peers may use it ever; 0: no limit. Not in tickets of the first releases."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The lease of `peer` on `slot`."""

    swarm: Key32
    peer: Key32
    slot: Slot
    serial: U63
    """Fencing: rises with every grant that this authority ever gave, over restarts too."""
    issued: Time
    capability: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The authority's word. Ordered by (boot, serial)."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    """How often the authority has started: the older of two with one key stops."""
    serial: U32
    time: Time
    """Authority time."""
    roster: U63
    """Serial of the newest roster."""
    epoch: U32
    version: U63
    """The newest sealed version."""
    live: Slots
    """Bit set by slot: not past hard expiry. Content may be given to these."""
    fresh: Slots
    """Bit set by slot: not past soft expiry either. Work and interior places go to these."""

    @property
    def order(self) -> tuple[int, int]:
        return self.boot, self.serial

    @property
    def stamp(self) -> int:
        """`order` as one number: what a `Hello` names."""
        return self.boot << 32 | self.serial

    @property
    def head(self) -> VersionId:
        return VersionId(self.epoch, self.version)


UNTIMED = 1
"""kbit/s of a neighbour that gave something, but too little to say how fast."""


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One neighbour, in a report."""

    slot: Slot
    kbit_s: Annotated[int, msgspec.Meta(ge=0, le=10_000_000_000)]
    """At which verified bytes came from it while it was sending; 0: none came, `UNTIMED`: too few to say."""
    short_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]
    """How much less than its part came from it (in one stripe of eight: an eighth), or how much slower than from our
    parents mostly."""
    rtt_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)]
    """Shortest; 0: not known."""


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's renewal and account of itself. What it says of itself is a claim; only `held` moves anything."""

    swarm: Key32
    peer: Key32
    slot: Slot
    grant: U63
    """Serial of the grant renewed."""
    counter: U63
    """Rises with every report of this grant; older ones are dropped."""
    heartbeat: Key32
    """`heartbeat_hash` of the last one seen."""
    epoch: U32
    version: U63
    """The version that its replica holds."""
    engine_epoch: U32
    engine_version: U63
    """The version that its engine generates with ((0, 0) with `engine` empty: none)."""
    engine: Annotated[str, msgspec.Meta(max_length=32)]
    sent_bytes: U63
    received_bytes: U63
    tokens_s: Rate
    leaving: bool
    catching_up: Annotated[float, msgspec.Meta(ge=0, le=1)]
    """How much of the model it has, while it catches up; 1: all."""
    lost: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)] = ()
    """Slots of parents that it lost: hearsay, which at most moves an edge."""
    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()
    """What it measured of its neighbours; once a version."""
    fetched_bytes: U63 = 0
    """Of blocks and what goes with them, since this grant: a claim, see `quota`."""
    gave: Annotated[tuple[tuple[Slot, U63], ...], msgspec.Meta(max_length=MAX_UPLOADS)] = ()
    """To whom it gave how much of that, since this grant; only what is new lately."""
    saving: bool = False
    """What it may send today is as good as used up: it is to stand inside no tree."""

    @property
    def held(self) -> VersionId:
        return VersionId(self.epoch, self.version)


_DOMAINS: dict[type, bytes] = {
    Capability: b"swarm-node capability 1",
    Grant: b"swarm-node grant 1",
    Heartbeat: b"swarm-node heartbeat 1",
    Report: b"swarm-node report 1",
}
_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(kind) for kind in _DOMAINS}


def seal(document: Capability | Grant | Heartbeat | Report, key: Key) -> bytes:
    """The document signed, as it travels."""
    if isinstance(document, Heartbeat):
        # Nearly all that live are fresh, and nearly all slots live: what travels is packed, and a tenth as large.
        soft = _xor(document.live, document.fresh)
        document = msgspec.structs.replace(document, live=_packed(document.live), fresh=_packed(soft))
    return key.seal(_DOMAINS[type(document)], _encoder.encode(document))


def _open(kind: type, sealed: bytes, signer: bytes):
    body = open_sealed(signer, _DOMAINS[kind], sealed)
    return unpack(_decoders[kind], body, kind.__name__.lower())


def _of_swarm(document, swarm: bytes):
    if document.swarm != swarm:
        raise PeerError(f"{type(document).__name__.lower()}: of another swarm")
    return document


def open_capability(sealed: bytes, swarm: bytes) -> Capability:
    """Verify, then decode. `PeerError` when it is not this swarm's."""
    return _of_swarm(_open(Capability, sealed, swarm), swarm)


def _packed(bits: bytes) -> bytes:
    return zlib.compress(bits, 9, wbits=-15)


def _unpacked(data: bytes) -> bytes:
    """At most a bit for each slot, however much `data` would unpack to."""
    opened = zlib.decompressobj(wbits=-15)
    try:
        bits = opened.decompress(data, MAX_SLOTS // 8)
    except zlib.error as error:
        raise PeerError(f"heartbeat: {error}") from error
    if not opened.eof or opened.unused_data:
        raise PeerError("heartbeat: more slots than there are")
    return bits


def _xor(a: bytes, b: bytes) -> bytes:
    bits = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


@lru_cache(maxsize=1024)
def open_grant(sealed: bytes, swarm: bytes) -> Grant:
    return _of_swarm(_open(Grant, sealed, swarm), swarm)


@lru_cache(maxsize=64)
def open_heartbeat(sealed: bytes, swarm: bytes) -> Heartbeat:
    heartbeat = _of_swarm(_open(Heartbeat, sealed, swarm), swarm)
    live = _unpacked(heartbeat.live)
    return msgspec.structs.replace(heartbeat, live=live, fresh=_xor(live, _unpacked(heartbeat.fresh)))


_REPORT_PEER = slice(SIGNATURE_BYTES + 39, SIGNATURE_BYTES + 71)
"""Where a report names its author: behind the array's head (3 bytes, since there are 16 fields or more), the swarm (a
head of 2 bytes, and 32) and the head of the next 32 bytes."""


def claimed_reporter(sealed: bytes) -> bytes:
    """The member that a report says it is of, read at its fixed place: nothing is decoded, and nothing is proven yet.

    So whoever gets reports of others can see at once whether it knows that member, before it checks a signature.
    Raises `PeerError` for what is no report.
    """
    body = sealed[SIGNATURE_BYTES:]
    if body[:1] != b"\xdc" or body[3:5] != b"\xc4\x20" or body[37:39] != b"\xc4\x20" or len(body) < 71:
        raise PeerError("report: this is none")
    return sealed[_REPORT_PEER]


@lru_cache(maxsize=1024)
def open_report(sealed: bytes, swarm: bytes) -> Report:
    """A report is signed by the member it names: verify, then decode."""
    claimed = claimed_reporter(sealed)
    report = _of_swarm(_open(Report, sealed, claimed), swarm)
    if report.peer != claimed:
        raise PeerError("report: of another member than it is signed by")
    return report


# Documents reach us by several trees: one signature check each is enough. A failed check is not remembered.


def heartbeat_hash(sealed: bytes) -> bytes:
    """What a report names to prove that its sender was alive after that heartbeat."""
    return blake3(sealed).digest()


def bit_set(slots: Iterable[int]) -> bytes:
    """Slots as a little-endian bit set."""
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def has_bit(bits: bytes, slot: int) -> bool:
    return slot >> 3 < len(bits) and bits[slot >> 3] >> (slot & 7) & 1 == 1
