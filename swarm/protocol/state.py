"""What one core (a member's or the authority's) knows: the state that its machines share, one event at a time."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from codec import Manifest
from codec.formats.share import Share
from codec.sign import Key
from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.documents import Grant
from swarm.protocol.core.events import Close, Drop, SendDone
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.uplink import Uplink
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Bye
from swarm.protocol.membership.entitlement import Entitlement, LostPeers, OwnLease
from swarm.protocol.membership.lease import Leases
from swarm.protocol.membership.roster import Roster
from swarm.protocol.membership.rosterbook import RosterBook
from swarm.protocol.membership.session import Sessions
from swarm.protocol.transfer.chunks import Chunks
from swarm.protocol.transfer.egress import Egress
from swarm.protocol.transfer.exchange import Exchange
from swarm.protocol.transfer.exchange_context import ExchangeContext
from swarm.protocol.transfer.late_joiners import LateJoiners
from swarm.protocol.transfer.repair.uploads import Uploads

__all__ = ["OwnUplink", "State"]


@dataclass(frozen=True, slots=True)
class OwnUplink:
    """What this peer may send."""

    gives: bool = True
    """Whether it sends other peers any content at first; see `Exchange.give`."""
    bytes_s: Callable[[], float] | None = None
    """What the uplink carries, in bytes/s; 0 while that is not known. None: what the roster says of this peer."""
    egress: Egress | None = None
    """The authority's budget; None: what is sent is not budgeted."""


@dataclass(slots=True)
class State:
    """Owned by a `Peer` or an `Authority`, whose machines read and write it."""

    key: Key
    swarm: bytes
    """The authority's public key."""
    tuning: Tuning
    rng: random.Random
    outbox: Outbox
    chunks: Chunks
    uplink: Uplink
    exchange: Exchange
    late_joiners: LateJoiners
    uploads: Uploads
    sessions: Sessions
    leases: Leases
    rosters: RosterBook
    own_lease: OwnLease
    lost_peers: LostPeers
    latest_boot: Callable[[float], int]
    """At this local time, the highest boot number of the authority that is believed."""
    succession: bytes
    """The sealed document that names this swarm's new key; empty: there is none."""
    held: VersionId | None = None
    """The version that our replica is, whole and proven (a relay: whose chunks it has); None: none yet."""
    manifest: Manifest | None = None
    """Of `held`."""
    sealed_manifest: bytes = b""
    manifests: dict[VersionId, bytes] = field(default_factory=dict)
    """Sealed manifests of the versions that we held, as many as `retain_versions`."""
    floor: VersionId = field(default_factory=lambda: VersionId(0, 0))
    """Versions up to this one are ignored: `held`, or what a catch-up aims at."""
    shard: Share | None = None
    """What of the model we hold; None: all of it."""
    may_attach: bool = True
    """Whether we attach to parents. A member with a shard waits for the layout: by it the member knows which chunks it
    needs."""

    @classmethod
    def new(
        cls,
        key: Key,
        swarm: bytes,
        tuning: Tuning,
        rng: random.Random,
        own_uplink: OwnUplink = OwnUplink(),
        *,
        latest_boot: Callable[[float], int] = lambda now: MAX_BOOT,
        succession: bytes = b"",
        shard: Share | None = None,
    ) -> "State":
        """The state of a core that starts; the authority's own when `swarm` is the public part of `key`."""
        outbox = Outbox()
        chunks, sessions = Chunks(outbox), Sessions(tuning, rng, outbox)
        leases, rosters = Leases(tuning), RosterBook(swarm, tuning)
        own_lease, lost_peers = OwnLease(is_authority=key.public == swarm), LostPeers(tuning)

        def planned_bytes_s() -> float:
            """What plans reckon our uplink to carry, which other members measured. 0 while no roster names us."""
            me = rosters.roster.member_of(key.public) if rosters.roster is not None else None
            return me.up_mbit * 125_000 if me is not None else 0.0

        late_joiners = LateJoiners(sessions, leases)
        uplink = Uplink(own_uplink.bytes_s or planned_bytes_s, careful=lambda: late_joiners.early)
        entitlement = Entitlement(rosters, own_lease, lost_peers)
        around = ExchangeContext(
            sessions.rtt_s, uplink, late_joiners, entitlement.is_entitled,
            chooses=lambda peer: sessions.shard_of(peer) is not None,
            egress_budget=own_uplink.egress,
        )  # fmt: skip
        exchange = Exchange(chunks, tuning, outbox, around, gives=own_uplink.gives)
        uploads = Uploads(tuning, outbox, chunks, exchange)
        return cls(
            key, swarm, tuning, rng, outbox, chunks, uplink, exchange, late_joiners, uploads, sessions, leases, rosters,
            own_lease, lost_peers, latest_boot, succession, shard=shard,
        )  # fmt: skip

    @property
    def roster(self) -> Roster | None:
        """The newest that we hold."""
        return self.rosters.roster

    @property
    def grant(self) -> Grant | None:
        """Our own, as a member; None while there is none that holds."""
        return self.own_lease.grant

    @property
    def sealed_grant(self) -> bytes:
        return self.own_lease.sealed

    def close(self, peer: bytes, why: str, ban_s: float = 0.0) -> None:
        """End the session with `peer`: messages that it sends until then are ignored and not held against it."""
        session = self.sessions.get(peer)
        if session is not None:
            session.closing = True
        self.outbox.emit(Close(peer, why, ban_s))

    def part(self, peer: bytes, why: str) -> None:
        """End a session that we have no use for: neither end is to count the other as lost."""
        session = self.sessions.get(peer)
        if session is not None:
            session.parted = True
        self.outbox.send(peer, Bye(b""))
        self.close(peer, why)

    def sent(self, event: SendDone, now: float) -> None:
        """A header or piece has left for a peer."""
        if event.pull:
            self.uploads.sent(event.peer, event.key)
        elif event.stripe is not None:
            self.exchange.sent(event.peer, event.stripe, event.key, event.index, now)

    def peer_of(self, slot: int) -> bytes | None:
        """The peer that holds a slot (`AUTHORITY`: the authority)."""
        if slot < 0:
            return self.swarm
        member = self.roster.member(slot) if self.roster is not None else None
        return member.peer if member is not None else None

    def children(self) -> list[bytes]:
        """Every peer that is attached to us in any stripe, once, in a fixed order."""
        return sorted({peer for edges in self.exchange.children.values() for peer in edges})

    def neighbours(self) -> set[bytes]:
        """Our parents and children: those attached, and those of the newest roster."""
        found = {edge.peer for edge in self.exchange.parents.edges.values()} | set(self.children())
        roster, slot = self.roster, self.own_lease.slot
        if roster is not None and slot is not None:
            planned = {child for stripe in range(roster.stripes) for child in roster.children(stripe, slot)}
            planned |= {up for stripe in range(roster.stripes) if (up := roster.parent(stripe, slot)) is not None}
            found |= {peer for each in planned if (peer := self.peer_of(each)) is not None}
        return found

    def set_held(self, id_: VersionId, manifest: Manifest, sealed: bytes) -> None:
        """We hold this version now. Chunks of the last `retain_versions` stay for others; older ones are dropped."""
        self.held, self.manifest, self.sealed_manifest = id_, manifest, sealed
        self.floor = max(self.floor, id_)
        self.late_joiners.version_held(id_)
        self.manifests[id_] = sealed
        for old in sorted(self.manifests)[: -self.tuning.retain_versions]:
            del self.manifests[old]
        sealed_ones = sorted(v for v in self.chunks.versions if v <= id_)
        for old in sealed_ones[: -self.tuning.retain_versions]:
            self.chunks.drop(old)
            self.exchange.forget(old)
            self.outbox.emit(Drop(old))
