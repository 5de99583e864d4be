"""Membership is a lease: the signed documents it hangs on, and the two ends' views of who is alive.

- `Capability` (in a ticket): the right to join, until it expires, for so many nodes.
- `Grant`: the lease of one peer on one slot, with a fencing serial: of two grants for a slot the higher serial counts.
- `Heartbeat`: the authority's clock and its word on which slots live; small, frequent, down all trees.
- `Report`: a member's renewal. It re-signs nothing of the authority's: it is signed by the member over the hash of the
  last heartbeat it saw, so nobody can forge one, replay an old one or keep the dead alive. It also says what the member
  holds.

Leases age by the authority's clock. A member therefore never computes an expiry: it reads the bit in the newest
heartbeat. While the authority is silent the bits stand still, for at most `Tuning.authority_silence_s` of local time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Annotated, NewType

import msgspec
from blake3 import blake3

from codec.errors import PeerError
from codec.sign import Key, open_sealed
from swarm.protocol.events import VersionId
from swarm.protocol.tuning import Tuning

__all__ = [
    "AuthorityTime",
    "Capability",
    "Grant",
    "Heartbeat",
    "Lease",
    "LeaseBook",
    "Leases",
    "Report",
    "Standing",
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
Slots = Annotated[bytes, msgspec.Meta(max_length=2048)]
MAX_SLOTS = 2048 * 8


class Capability(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The right to join."""

    swarm: Key32
    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    expires: float
    """Authority time."""
    nodes: U32
    """How many different peers may use it. Each is bound at its first use."""
    quota_bytes: U63
    """How much one of them may fetch while catching up; 0: no limit."""


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The lease of `peer` on `slot`."""

    swarm: Key32
    peer: Key32
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
    serial: U63
    """Fencing: rises with every grant that this authority ever gave, over restarts too."""
    issued: float
    capability: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The authority's word. Ordered by (boot, serial)."""

    swarm: Key32
    boot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    """How often the authority has started: the older of two with one key stops."""
    serial: U32
    time: float
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


class Report(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A member's renewal and account of itself. What it says of itself is a claim; only `held` moves anything."""

    swarm: Key32
    peer: Key32
    slot: Annotated[int, msgspec.Meta(ge=0, lt=MAX_SLOTS)]
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
    return key.seal(_DOMAINS[type(document)], _encoder.encode(document))


def _open(kind: type, sealed: bytes, signer: bytes):
    body = open_sealed(signer, _DOMAINS[kind], sealed)
    try:
        return _decoders[kind].decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PeerError(f"{kind.__name__.lower()}: {error}") from error


def _of_swarm(document, swarm: bytes):
    if document.swarm != swarm:
        raise PeerError(f"{type(document).__name__.lower()}: of another swarm")
    return document


def open_capability(sealed: bytes, swarm: bytes) -> Capability:
    """Verify, then decode. `PeerError` when it is not this swarm's."""
    return _of_swarm(_open(Capability, sealed, swarm), swarm)


@lru_cache(maxsize=1024)
def open_grant(sealed: bytes, swarm: bytes) -> Grant:
    return _of_swarm(_open(Grant, sealed, swarm), swarm)


@lru_cache(maxsize=64)
def open_heartbeat(sealed: bytes, swarm: bytes) -> Heartbeat:
    return _of_swarm(_open(Heartbeat, sealed, swarm), swarm)


@lru_cache(maxsize=1024)
def open_report(sealed: bytes, swarm: bytes) -> Report:
    """A report is signed by the member it names."""
    try:
        claimed = _decoders[Report].decode(sealed[64:])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise PeerError(f"report: {error}") from error
    return _of_swarm(_open(Report, sealed, claimed.peer), swarm)


# Documents reach us by several trees: one signature check each is enough. A failed check is not remembered.


def heartbeat_hash(sealed: bytes) -> bytes:
    """What a report names to prove that its sender was alive after that heartbeat."""
    return blake3(sealed).digest()


def bit_set(slots: Iterator[int] | list[int] | set[int]) -> bytes:
    """Slots as a little-endian bit set."""
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def has_bit(bits: bytes, slot: int) -> bool:
    return slot >> 3 < len(bits) and bits[slot >> 3] >> (slot & 7) & 1 == 1


class Standing(Enum):
    """Where a lease stands. Soft expiry: no new work, no interior place. Hard expiry: no content."""

    FRESH = "fresh"
    SOFT = "soft"
    DEAD = "dead"


class Leases:
    """A member's view: the newest heartbeat, and what it says of each slot."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.heartbeat: Heartbeat | None = None
        self.sealed = b""
        self.heard_at = 0.0
        """Local time at which the newest one arrived."""
        self.hash = b""
        """`heartbeat_hash` of the newest one."""

    def hear(self, sealed: bytes, swarm: bytes, now: float) -> bool:
        """Take a heartbeat in; True when it is news. `PeerError` when it is forged."""
        if sealed == self.sealed:
            return False
        heartbeat = open_heartbeat(sealed, swarm)
        if self.heartbeat is not None and heartbeat.order <= self.heartbeat.order:
            return False
        self.heartbeat, self.sealed, self.heard_at = heartbeat, sealed, now
        self.hash = heartbeat_hash(sealed)
        return True

    def standing(self, slot: int, now: float) -> Standing:
        if self.heartbeat is None or now - self.heard_at > self._tuning.authority_silence_s:
            return Standing.DEAD
        if has_bit(self.heartbeat.fresh, slot):
            return Standing.FRESH
        return Standing.SOFT if has_bit(self.heartbeat.live, slot) else Standing.DEAD

    def authority_time(self, now: float) -> AuthorityTime:
        """The authority's clock as far as we heard it; it stands still while the authority is silent."""
        return AuthorityTime(self.heartbeat.time if self.heartbeat else 0.0)

    def silent_s(self, now: float) -> float:
        return now - self.heard_at if self.heartbeat else 0.0


@dataclass(slots=True)
class Lease:
    """The authority's record of one slot."""

    grant: Grant
    sealed: bytes
    renewed: AuthorityTime
    report: Report | None = None


class LeaseBook:
    """The authority's view: which slot is leased to whom, and when each was last heard of. All times authority time."""

    HEARTBEATS_KEPT = 32
    """A report may name any of the last so many heartbeats; an older one proves nothing."""

    def __init__(self, swarm: bytes, key: Key, tuning: Tuning, next_serial: int = 1) -> None:
        self._swarm = swarm
        self._key = key
        self._tuning = tuning
        self._recent: dict[bytes, AuthorityTime] = {}
        self._used: dict[bytes, set[bytes]] = {}
        self.next_serial = next_serial
        self.leases: dict[int, Lease] = {}
        self.slot_of: dict[bytes, int] = {}

    def admit(self, capability: Capability, peer: bytes, now: AuthorityTime) -> Lease | str:
        """A grant for `peer`, or one sentence why not. A peer that still has a lease gets a new serial for its slot."""
        if now >= capability.expires:
            return "This ticket has expired: ask for a new one (swarm-node invite)."
        used = self._used.setdefault(capability.id, set())
        if peer not in used and len(used) >= capability.nodes:
            return f"All {capability.nodes} places of this ticket are taken: ask for a new one (swarm-node invite)."
        slot = self.slot_of.get(peer)
        if slot is None:
            slot = next((s for s in range(MAX_SLOTS) if s not in self.leases), None)
        if slot is None:
            return f"The swarm is full ({MAX_SLOTS} nodes)."
        used.add(peer)
        grant = Grant(self._swarm, peer, slot, self.next_serial, now, capability.id)
        self.next_serial += 1
        lease = Lease(grant, seal(grant, self._key), now)
        self.leases[slot] = lease
        self.slot_of[peer] = slot
        return lease

    def restore(self, sealed_grants: list[bytes], now: AuthorityTime) -> None:
        """After a restart: leases stood still while we were away, so each is as fresh as if renewed now."""
        grants = [(open_grant(sealed, self._swarm), sealed) for sealed in sealed_grants]
        for grant, sealed in sorted(grants, key=lambda g: g[0].serial):
            # Of two for a slot or for a peer the later counts: the disk may hold one that a crash kept from release.
            self.release(grant.slot)
            self.release(self.slot_of.get(grant.peer, grant.slot))
            self.leases[grant.slot] = Lease(grant, sealed, now)
            self.slot_of[grant.peer] = grant.slot
            self._used.setdefault(grant.capability, set()).add(grant.peer)
            self.next_serial = max(self.next_serial, grant.serial + 1)

    def beat(self, sealed_heartbeat: bytes, now: AuthorityTime) -> None:
        """Remember a heartbeat we sent: reports must name one."""
        self._recent[heartbeat_hash(sealed_heartbeat)] = now
        while len(self._recent) > self.HEARTBEATS_KEPT:
            del self._recent[next(iter(self._recent))]

    def renew(self, report: Report, now: AuthorityTime) -> bool:
        """Take in a verified report; True when it counted. It renews as of the heartbeat that it names, not of now."""
        lease = self.leases.get(report.slot)
        proven = self._recent.get(report.heartbeat)
        if lease is None or proven is None or lease.grant.peer != report.peer or lease.grant.serial != report.grant:
            return False
        if lease.report is not None and report.counter <= lease.report.counter:
            return False
        lease.report = report
        lease.renewed = max(lease.renewed, proven)
        if report.leaving:
            self.release(report.slot)
        return True

    def standing(self, slot: int, now: AuthorityTime) -> Standing:
        lease = self.leases.get(slot)
        if lease is None:
            return Standing.DEAD
        age = now - lease.renewed
        if age <= self._tuning.soft_ttl_s:
            return Standing.FRESH
        return Standing.SOFT if age <= self._tuning.hard_ttl_s else Standing.DEAD

    def left_s(self, slot: int, now: AuthorityTime) -> float:
        """Seconds until hard expiry."""
        return self.leases[slot].renewed + self._tuning.hard_ttl_s - now

    def release(self, slot: int) -> None:
        lease = self.leases.pop(slot, None)
        if lease is not None:
            self.slot_of.pop(lease.grant.peer, None)

    def expire(self, now: AuthorityTime) -> list[tuple[int, bytes]]:
        """Free the slots past hard expiry; which they were, and whose."""
        dead = [(s, lease.grant.peer) for s, lease in self.leases.items() if self.standing(s, now) is Standing.DEAD]
        for slot, _ in dead:
            self.release(slot)
        return dead

    def bits(self, now: AuthorityTime) -> tuple[bytes, bytes]:
        """(live, fresh) for a heartbeat."""
        standing = {slot: self.standing(slot, now) for slot in self.leases}
        live = [slot for slot, s in standing.items() if s is not Standing.DEAD]
        fresh = [slot for slot, s in standing.items() if s is Standing.FRESH]
        return bit_set(live), bit_set(fresh)
