"""Leases: the authority's and a member's views of which members are alive. See `documents` for the messages.

Leases age by the authority's clock. So a member never computes an expiry: it reads the bits of the newest heartbeat.
While the authority is silent the bits do not change, for at most `Tuning.authority_silence_s` of local time.
"""

from dataclasses import dataclass

from codec.formats.share import Share, fields_of
from codec.sign import Key
from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.documents import (
    MAX_SLOTS,
    AuthorityTime,
    Capability,
    Grant,
    Heartbeat,
    Report,
    bit_set,
    has_bit,
    heartbeat_hash,
    open_grant,
    open_heartbeat,
    seal,
)
from swarm.protocol.core.standing import Standing, standing_at
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.membership.tickets import TICKET, Refusal, Tickets

__all__ = ["Lease", "LeaseBook", "Leases", "Standing"]


class Leases:
    """A member's view: the newest heartbeat, and the standing of each slot in it."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self.heartbeat: Heartbeat | None = None
        self.sealed = b""
        self.heard_at = 0.0
        """Local time at which the newest heartbeat arrived."""
        self.hash = b""
        """`heartbeat_hash` of the newest heartbeat."""

    def hear(self, sealed: bytes, swarm: bytes, now: float, latest_boot: int = MAX_BOOT) -> bool:
        """Take a heartbeat; True if it is new. Raises `PeerError` if it is forged.

        A heartbeat of a boot after `latest_boot` is ignored, without blame for the peer that sent it: our clock may be
        wrong.
        """
        if sealed == self.sealed:
            return False
        heartbeat = open_heartbeat(sealed, swarm)
        if heartbeat.boot > latest_boot:
            return False
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
        """The authority's time in the newest heartbeat; it stands still while the authority is silent."""
        return AuthorityTime(self.heartbeat.time if self.heartbeat else 0.0)

    def silent_s(self, now: float) -> float:
        """Seconds of local time since the newest heartbeat arrived."""
        return now - self.heard_at if self.heartbeat else 0.0


@dataclass(slots=True)
class Lease:
    """The authority's record of one slot. `sealed`: the signed grant."""

    grant: Grant
    sealed: bytes
    renewed: AuthorityTime
    report: Report | None = None


class LeaseBook:
    """The authority's view: the holder of each slot, and the time of its last renewal. All times are authority time."""

    HEARTBEATS_KEPT = 32
    """A report must name one of the newest heartbeats, of which this number is remembered."""

    def __init__(self, swarm: bytes, key: Key, tuning: Tuning, next_serial: int = 1) -> None:
        self._swarm = swarm
        self._key = key
        self._tuning = tuning
        self._recent: dict[bytes, AuthorityTime] = {}
        self.tickets = Tickets()
        self.next_serial = next_serial
        self.leases: dict[int, Lease] = {}
        self.slot_of: dict[bytes, int] = {}

    def admit(
        self, capability: Capability, peer: bytes, now: AuthorityTime, shard: Share | None = None
    ) -> Lease | Refusal:
        """Grant a lease to `peer`, or refuse it. A peer that still has a lease keeps its slot, with a new serial.

        `shard`: what of the model it holds; None: all of it.
        """
        refusal = self.tickets.refusal(capability, peer, now)
        if refusal is not None:
            return refusal
        slot = self.slot_of.get(peer)
        if slot is None:
            slot = next((s for s in range(MAX_SLOTS) if s not in self.leases), None)
        if slot is None:
            return Refusal(TICKET, f"The swarm is full ({MAX_SLOTS} nodes).")
        self.release(slot)  # ends an older grant, perhaps by another ticket
        self.tickets.bind(capability.id, peer)
        shards, ranks, form = fields_of(shard)
        grant = Grant(self._swarm, peer, slot, self.next_serial, now, capability.id, shards, ranks, form)
        self.next_serial += 1
        lease = Lease(grant, seal(grant, self._key), now)
        self.leases[slot] = lease
        self.slot_of[peer] = slot
        return lease

    def restore(self, sealed_grants: list[bytes], now: AuthorityTime) -> None:
        """Restore leases after a restart. They did not age while the authority was down, so all count as renewed."""
        grants = [(open_grant(sealed, self._swarm), sealed) for sealed in sealed_grants]
        for grant, sealed in sorted(grants, key=lambda g: g[0].serial):
            # Of two grants for a slot or for a peer the later counts: a crash may have kept the other from release.
            self.release(grant.slot)
            self.release(self.slot_of.get(grant.peer, grant.slot))
            self.leases[grant.slot] = Lease(grant, sealed, now)
            self.slot_of[grant.peer] = grant.slot
            self.tickets.resume(grant.capability, grant.peer)
            self.next_serial = max(self.next_serial, grant.serial + 1)

    def beat(self, sealed_heartbeat: bytes, now: AuthorityTime) -> None:
        """Remember a heartbeat that was sent, since reports must name one."""
        self._recent[heartbeat_hash(sealed_heartbeat)] = now
        while len(self._recent) > self.HEARTBEATS_KEPT:
            del self._recent[next(iter(self._recent))]

    def renew(self, report: Report, now: AuthorityTime) -> bool:
        """Take a verified report; True if it renewed the lease, as of the time of the heartbeat that it names."""
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
        return standing_at(now - lease.renewed, self._tuning)

    def left_s(self, slot: int, now: AuthorityTime) -> float:
        """Seconds until hard expiry of the slot's lease."""
        return self.leases[slot].renewed + self._tuning.hard_ttl_s - now

    def release(self, slot: int) -> None:
        """End the lease of `slot`, if there is one."""
        lease = self.leases.pop(slot, None)
        if lease is not None:
            self.slot_of.pop(lease.grant.peer, None)
            self.tickets.left(lease.grant.capability, lease.grant.peer)

    def expire(self, now: AuthorityTime) -> list[tuple[int, bytes]]:
        """Free the slots past hard expiry: (slot, peer) of each."""
        dead = [(s, lease.grant.peer) for s, lease in self.leases.items() if self.standing(s, now) is Standing.DEAD]
        for slot, _ in dead:
            self.release(slot)
        return dead

    def bits(self, now: AuthorityTime) -> tuple[bytes, bytes]:
        """The bit sets (live, fresh) for a heartbeat."""
        standing = {slot: self.standing(slot, now) for slot in self.leases}
        live = [slot for slot, s in standing.items() if s.rights.content]
        fresh = [slot for slot, s in standing.items() if s is Standing.FRESH]
        return bit_set(live), bit_set(fresh)
