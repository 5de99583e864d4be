"""The signed documents of membership, as they travel.

- `Capability` (in a ticket): the right to join, until it expires, for a number of nodes.
- `Grant`: the lease of one peer on one slot, with a fencing serial: of two grants for a slot the higher serial counts.
- `Heartbeat`: the authority's clock, and which slots' leases live; small, frequent, sent down all trees.
- `Report`: a member's renewal, and what it holds. The member signs it over the hash of the last heartbeat that it saw,
  so no other peer can forge one, replay an old one, or keep a dead member's lease alive.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, NewType

import msgspec
from blake3 import blake3

from codec.errors import PeerError, UsageError
from codec.formats.share import Share, share_of
from codec.shards import MAX_RANKS
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
Ranks = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)], ...], msgspec.Meta(max_length=MAX_RANKS)]
FormatName = Annotated[str, msgspec.Meta(max_length=64)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""Authority time, in seconds. The bounds also keep NaN and infinity out of arithmetic."""
MAX_SLOTS = 2048 * 8
"""Members of a swarm at most: a bit set of them has 2,048 bytes."""
Slots = Annotated[bytes, msgspec.Meta(max_length=2080)]
"""A packed bit set of `MAX_SLOTS` bits. Bits that do not compress take a few bytes more than plain ones."""
Slot = Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
MAX_LINKS = 32
"""Neighbours in one report: four times as many as there are stripes (8)."""
MAX_UPLOADS = 16
"""Peers in one report to which blocks were sent; further ones stand in the next report."""


class Capability(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right to join."""

    swarm: Key32
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    expires: Time
    """Authority time."""
    nodes: U32
    """How many peers may hold a lease by it at a time."""
    quota_bytes: U63
    """Bytes that these peers may fetch in all while catching up; 0: no limit."""
    nodes_ever: U32 = 0
    """How many different peers may ever use it; 0: no limit. Tickets of the first releases lack this field."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The lease of `peer` on `slot`."""

    swarm: Key32
    peer: Key32
    slot: Slot
    serial: U63
    """Fencing: higher in each further grant of this authority, across restarts too."""
    issued: Time
    capability: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    shards: Annotated[int, msgspec.Meta(ge=0, le=MAX_RANKS)] = 0
    """Over how many ranks the experts are dealt of which the peer holds some; 0: it holds the whole model. The grant of
    such a peer lacks this field and the next, as those of the first releases do."""
    ranks: Ranks = ()
    """The ranks whose blocks it holds."""
    form: FormatName = ""
    """The format that it holds; empty: none. A grant without a format lacks this field."""

    @property
    def shard(self) -> Share | None:
        """What of the model the peer holds; None: all of it."""
        return share_of(self.shards, self.ranks, self.form)


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The authority's time, newest version and live leases. Ordered by (boot, serial)."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    """Number of the authority's boot, see `boots`: of two authorities with one key the one with the lower number
    stops."""
    serial: U32
    time: Time
    """Authority time."""
    roster: U63
    """Serial of the newest roster."""
    epoch: U32
    version: U63
    """The newest sealed version."""
    live: Slots
    """Bit set by slot: leases not past hard expiry, whose holders may get content."""
    fresh: Slots
    """Bit set by slot: leases not past soft expiry, whose holders may be interior in a tree."""

    @property
    def order(self) -> tuple[int, int]:
        return self.boot, self.serial

    @property
    def stamp(self) -> int:
        """`order` as one number, as a `Hello` names it."""
        return self.boot << 32 | self.serial

    @property
    def head(self) -> VersionId:
        return VersionId(self.epoch, self.version)


UNTIMED = 1
"""`Link.kbit_s` of a neighbour that sent too little for its rate to be measured."""


class Link(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a member measured of one neighbour."""

    slot: Slot
    kbit_s: Annotated[int, msgspec.Meta(ge=0, le=10_000_000_000)]
    """Rate of its verified bytes while it was sending; 0: none came; `UNTIMED`: too few came to tell."""
    short_percent: Annotated[int, msgspec.Meta(ge=0, le=100)]
    """By how many percent it brought less than its part (an eighth for one stripe of eight), or was slower than the
    median of the member's parents, whichever is more."""
    rtt_ms: Annotated[int, msgspec.Meta(ge=0, le=60_000)]
    """The shortest round trip; 0: not known."""


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's renewal and account of itself. What a member says of itself is a claim."""

    swarm: Key32
    peer: Key32
    slot: Slot
    grant: U63
    """Serial of the grant renewed."""
    counter: U63
    """Higher in each further report under this grant; the authority drops older ones."""
    heartbeat: Key32
    """`heartbeat_hash` of the last heartbeat that the member saw."""
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
    """The share of the model that it has while it catches up, 0 to 1; 1: all."""
    lost: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)] = ()
    """Slots of parents that it lost. Hearsay, which at most moves an edge."""
    links: Annotated[tuple[Link, ...], msgspec.Meta(max_length=MAX_LINKS)] = ()
    """What it measured of its neighbours; given once a version."""
    fetched_bytes: U63 = 0
    """Bytes of blocks, lists and files that it fetched under this grant. A claim; see `quota`."""
    gave: Annotated[tuple[tuple[Slot, U63], ...], msgspec.Meta(max_length=MAX_UPLOADS)] = ()
    """Slots that it sent such bytes to, and how many under this grant; only those whose number changed lately."""
    saving: bool = False
    """What it may send today is nearly used up, so it should be a leaf in every tree."""

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
        # Nearly all live leases are fresh, and nearly all slots live: the packed bits are a tenth as large.
        soft = _xor(document.live, document.fresh)
        document = msgspec.structs.replace(document, live=_packed(document.live), fresh=_packed(soft))
    fields: object = document
    if isinstance(document, Grant) and not document.form:
        fields = msgspec.structs.astuple(document)[: -3 if document.shard is None else -1]
    return key.seal(_DOMAINS[type(document)], _encoder.encode(fields))


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
    """The bits; no more than one for each slot is unpacked, whatever `data` claims. `PeerError` when there are more."""
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


# A document arrives by several trees and is verified once: hence the caches. A failed check raises, which is not
# cached.


@lru_cache(maxsize=1024)
def open_grant(sealed: bytes, swarm: bytes) -> Grant:
    """Verify, then decode. `PeerError` when it is not this swarm's, or names a shard that cannot be."""
    grant = _of_swarm(_open(Grant, sealed, swarm), swarm)
    try:
        grant.shard  # noqa: B018 - it is checked by being built
    except UsageError as error:
        raise PeerError(f"grant.shard: {error}") from error
    return grant


@lru_cache(maxsize=64)
def open_heartbeat(sealed: bytes, swarm: bytes) -> Heartbeat:
    """Verify, then decode and unpack the bit sets. `PeerError` when it is not this swarm's."""
    heartbeat = _of_swarm(_open(Heartbeat, sealed, swarm), swarm)
    live = _unpacked(heartbeat.live)
    return msgspec.structs.replace(heartbeat, live=live, fresh=_xor(live, _unpacked(heartbeat.fresh)))


_REPORT_PEER = slice(SIGNATURE_BYTES + 39, SIGNATURE_BYTES + 71)
"""Where a report names its author: after the signature, the array's head (3 bytes, since there are 16 fields or more),
the swarm's key (a head of 2 bytes, then 32 bytes) and the 2-byte head of the author's key."""


def claimed_reporter(sealed: bytes) -> bytes:
    """The member that a report names as its author, read at its fixed place. Nothing is decoded or verified.

    So a receiver can check that it knows the author before it pays for a signature check. Raises `PeerError` when the
    bytes are not a report.
    """
    body = sealed[SIGNATURE_BYTES:]
    if body[:1] != b"\xdc" or body[3:5] != b"\xc4\x20" or body[37:39] != b"\xc4\x20" or len(body) < 71:
        raise PeerError("report: not a signed report")
    return sealed[_REPORT_PEER]


@lru_cache(maxsize=1024)
def open_report(sealed: bytes, swarm: bytes) -> Report:
    """Verify by the key of the member that the report names, then decode. `PeerError` when it is forged."""
    claimed = claimed_reporter(sealed)
    report = _of_swarm(_open(Report, sealed, claimed), swarm)
    if report.peer != claimed:
        raise PeerError("report: of another member than it is signed by")
    return report


def heartbeat_hash(sealed: bytes) -> bytes:
    """The hash by which a report names a heartbeat: it proves that its member was alive after that heartbeat."""
    return blake3(sealed).digest()


def bit_set(slots: Iterable[int]) -> bytes:
    """Slots as a little-endian bit set."""
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def has_bit(bits: bytes, slot: int) -> bool:
    return slot >> 3 < len(bits) and bits[slot >> 3] >> (slot & 7) & 1 == 1
