"""What one peer (or the authority) knows: the one state that applied events change, shared by its machines."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from codec import Manifest
from codec.sign import Key
from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.documents import Grant
from swarm.protocol.core.events import Close, Drop, Effect, Notify, Send, SendDone, VersionId
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.uplink import Uplink
from swarm.protocol.core.wire import Message
from swarm.protocol.membership.lease import Leases
from swarm.protocol.membership.roster import Roster
from swarm.protocol.membership.rosterbook import RosterBook
from swarm.protocol.membership.session import Sessions
from swarm.protocol.transfer.chunks import Chunks
from swarm.protocol.transfer.exchange import Exchange
from swarm.protocol.transfer.late_joiners import LateJoiners
from swarm.protocol.transfer.pull import Uploads

__all__ = ["State"]


@dataclass(slots=True)
class State:
    """Owned by a `Peer` or an `Authority`; its machines read and write it, one event at a time."""

    key: Key
    swarm: bytes
    """The authority's public key."""
    tuning: Tuning
    rng: random.Random
    chunks: Chunks
    uplink: Uplink
    exchange: Exchange
    late_joiners: LateJoiners
    uploads: Uploads
    sessions: Sessions
    leases: Leases
    rosters: RosterBook
    latest_boot: Callable[[float], int] = lambda now: MAX_BOOT
    """At this local time, the last boot of the authority that is believed."""
    succession: bytes = b""
    """The sealed word that this swarm has a new key; empty: it has not."""
    grant: Grant | None = None
    sealed_grant: bytes = b""
    held: VersionId | None = None
    """The version that our replica is, whole and proven (a relay: whose chunks it has); None: none yet."""
    manifest: Manifest | None = None
    """Of `held`."""
    sealed_manifest: bytes = b""
    manifests: dict[VersionId, bytes] = field(default_factory=dict)
    """Sealed manifests of the versions that we held, as many as `retain_versions`."""
    floor: VersionId = field(default_factory=lambda: VersionId(0, 0))
    """Versions up to this one are of no more interest: `held`, or what a catch-up aims at."""
    effects: list[Effect] = field(default_factory=list)

    @classmethod
    def new(cls, key: Key, swarm: bytes, tuning: Tuning, rng: random.Random) -> "State":
        chunks, sessions, leases, rosters = Chunks(), Sessions(tuning, rng), Leases(tuning), RosterBook(swarm, tuning)

        def up_bytes_s() -> float:
            """What plans reckon our uplink to carry: what others measured. 0 while we stand in none."""
            me = rosters.roster.member_of(key.public) if rosters.roster is not None else None
            return me.up_mbit * 125_000 if me is not None else 0.0

        late_joiners = LateJoiners(sessions, leases)
        uplink = Uplink(up_bytes_s, careful=lambda: late_joiners.early)
        exchange = Exchange(chunks, tuning, sessions.rtt_s, uplink, late_joiners)
        return cls(
            key, swarm, tuning, rng, chunks, uplink, exchange, late_joiners, Uploads(tuning), sessions, leases, rosters,
        )  # fmt: skip

    @property
    def roster(self) -> Roster | None:
        """The newest that we hold."""
        return self.rosters.roster

    def emit(self, effect: Effect) -> None:
        self.effects.append(effect)

    def send(self, peer: bytes, message: Message) -> None:
        self.effects.append(Send(peer, message))

    def close(self, peer: bytes, why: str, ban_s: float = 0.0) -> None:
        """End the session with `peer`: what it says until it hears of that is not listened to, nor held against it."""
        session = self.sessions.get(peer)
        if session is not None:
            session.closing = True
        self.effects.append(Close(peer, why, ban_s))

    def notify(self, what: str, **info: object) -> None:
        self.effects.append(Notify(what, dict(info)))

    def sent(self, event: SendDone, now: float) -> None:
        """A header or piece has left for a peer."""
        if event.pull:
            self.uploads.sent(event.peer, event.key)
        elif event.stripe is not None:
            self.exchange.sent(event.peer, event.stripe, event.key, event.index, now, self.effects)

    def take_effects(self) -> list[Effect]:
        effects, self.effects = self.effects, []
        return effects

    def peer_of(self, slot: int) -> bytes | None:
        """The peer that holds a slot (`AUTHORITY`: the authority)."""
        if slot < 0:
            return self.swarm
        member = self.roster.member(slot) if self.roster is not None else None
        return member.peer if member is not None else None

    def children(self) -> list[bytes]:
        """Every peer that hangs on us in any stripe, once, in a fixed order."""
        return sorted({peer for edges in self.exchange.children.values() for peer in edges})

    def settle(self, id_: VersionId, manifest: Manifest, sealed: bytes) -> None:
        """We hold this version now. Chunks of the last `retain_versions` stay for others; older ones go."""
        self.held, self.manifest, self.sealed_manifest = id_, manifest, sealed
        self.floor = max(self.floor, id_)
        self.late_joiners.settled(id_)
        self.manifests[id_] = sealed
        for old in sorted(self.manifests)[: -self.tuning.retain_versions]:
            del self.manifests[old]
        sealed_ones = sorted(v for v in self.chunks.versions if v <= id_)
        for old in sealed_ones[: -self.tuning.retain_versions]:
            self.chunks.drop(old)
            self.exchange.forget(old)
            self.emit(Drop(old))
