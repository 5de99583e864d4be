"""The trainer's end: it admits, plans, beats, deals chunks, and seals. It trusts nothing but its own key.

who may be here ............ lease.LeaseBook
who stands where ........... plan.plan, re-planned when membership changes
which stripe gets a chunk .. deal.Dealer
pieces to the heads ........ exchange
"""

import random
from collections.abc import Callable
from typing import Any

from codec import ChunkKey, open_manifest
from codec.errors import PeerError
from codec.sign import Key
from swarm.protocol.deal import Dealer
from swarm.protocol.enrolment import Enrolment, Enrolments, open_record, record_of
from swarm.protocol.events import (
    Announce,
    Effect,
    Event,
    HeaderStored,
    Heard,
    LocalChunk,
    LocalSeal,
    PeerDown,
    PeerUp,
    Persist,
    Persisted,
    PieceBad,
    Probed,
    SendBlob,
    SendBlock,
    SendDone,
    SetTimer,
    Timer,
    VersionId,
)
from swarm.protocol.lease import (
    AuthorityTime,
    Capability,
    Grant,
    Heartbeat,
    LeaseBook,
    Report,
    Standing,
    open_capability,
    open_grant,
    open_report,
    seal,
)
from swarm.protocol.membership import reach_out, share_news
from swarm.protocol.peer import BAN_S, serve_chunk, serve_manifest
from swarm.protocol.plan import AUTHORITY, Member, Roster, plan, seal_roster
from swarm.protocol.reach import Place, Scope
from swarm.protocol.session import Session
from swarm.protocol.state import State
from swarm.protocol.tuning import Tuning
from swarm.protocol.wire import (
    Attach,
    Bye,
    Credit,
    Detach,
    HeartbeatNews,
    Hello,
    Join,
    ManifestNews,
    Message,
    Refused,
    Reports,
    RosterNews,
    WantBlob,
    WantBlock,
    WantChunk,
    WantManifest,
    Welcome,
    Work,
)

__all__ = ["Authority"]


class Authority:
    """Everything that the trainer's seed decides. Pure: `apply(event, now)` in, effects out."""

    def __init__(
        self,
        key: Key,
        addrs: tuple[str, ...],
        tuning: Tuning,
        rng: random.Random,
        *,
        boot: int,
        clock: Callable[[float], float],
        head: bytes,
        grants: list[bytes] | None = None,
        now: float = 0.0,
    ) -> None:
        """`clock` turns local time into authority time. `head`: sealed manifest of the newest sealed version. `grants`:
        what `Persist` left under `grant/...` in an earlier boot, less what is empty; those leases stood still
        meanwhile. `boot`: how often this key has started, made durable before this is built.
        """
        self.state = State.new(key, key.public, tuning, rng)
        self.boot = boot
        self.addrs = addrs
        self._clock = clock
        # Serials of this boot lie above all that any earlier one can have given, released ones too.
        self.book = LeaseBook(key.public, key, tuning, next_serial=boot << 32)
        self._enrolled = Enrolments(self.state.emit)
        self._restore(grants or [], now)
        self.dealer = Dealer(self.state.exchange, self.state.chunks, self._is_head)
        self._awaiting: dict[str, bytes] = {}
        """Grants on their way to the disk: token -> peer."""
        self._welcoming: list[bytes] = []
        """Peers whose grant is durable: they are welcomed with the next plan."""
        self._lost: dict[int, float] = {}
        self._stale_plan = True
        self._planned_at = float("-inf")
        self._roster_serial = 0
        self._beat_serial = 0
        self._next_beat = now
        self.superseded = False
        """A later boot of our own key is at work: we have stopped."""
        manifest = open_manifest(head, key.public)
        self.state.settle(VersionId(manifest.epoch, manifest.version), manifest, head)
        self._on: dict[type[Event], Callable[[Any, float], None]] = {
            PeerUp: self._peer_up,
            PeerDown: self._peer_down,
            Heard: self._heard,
            HeaderStored: self._stored_before,
            PieceBad: lambda e, now: self.state.close(e.peer, e.what, BAN_S),
            SendDone: self.state.sent,
            Persisted: self._persisted,
            Probed: self._probed,
            LocalChunk: self._local_chunk,
            LocalSeal: self._local_seal,
            Timer: self._tick,
        }
        self._says: dict[type, Callable[[Session, Any, float], None]] = {
            Reports: self._reports,
            Attach: self._attach,
            Detach: lambda s, m, now: self.state.exchange.detached(s.peer, m.stripe, self.state.effects),
            Credit: self._credit,
            WantChunk: lambda s, m, now: serve_chunk(self.state, s.peer, m),
            WantBlob: lambda s, m, now: self.state.emit(SendBlob(s.peer, m.request, m.kind, m.name, m.offset)),
            WantBlock: lambda s, m, now: self.state.emit(SendBlock(s.peer, m.request, m.block)),
            WantManifest: lambda s, m, now: serve_manifest(self.state, s.peer, m),
            Work: lambda s, m, now: self.state.notify("work", peer=s.peer, body=m.body),
            Bye: self._bye,
            HeartbeatNews: self._rival,
            RosterNews: lambda s, m, now: None,
            ManifestNews: lambda s, m, now: None,
        }

    def start(self, now: float, addrs: tuple[str, ...] = ()) -> list[Effect]:
        """The first effects. `addrs`: where we listen, unless we were told where the world finds us."""
        self.addrs = self.addrs or addrs
        self._tick(Timer("tick"), now)
        return self.state.take_effects()

    def apply(self, event: Event, now: float) -> list[Effect]:
        if not self.superseded and type(event) in self._on:
            self._on[type(event)](event, now)
            self.dealer.deal(now, self.state.effects)
        return self.state.take_effects()

    def invite(self, capability: Capability) -> bytes:
        """A capability, signed: what a ticket carries."""
        return seal(capability, self.state.key)

    def kick(self, slot: int, now: float) -> list[Effect]:
        """End a lease now; its holder gets nothing more."""
        lease = self.book.leases.get(slot)
        if lease is not None:
            self.book.release(slot)
            self._freed(slot, lease.grant.peer)
            self.state.close(lease.grant.peer, "kicked", BAN_S)
            self._beat(now)
        return self.state.take_effects()

    def standing(self, slot: int, now: float) -> Standing:
        """Where the lease of `slot` stands."""
        return self.book.standing(slot, self._time(now))

    def lease_left_s(self, slot: int, now: float) -> float:
        """Seconds until the lease of `slot` ends, if nothing is heard of its holder."""
        return self.book.left_s(slot, self._time(now))

    def _time(self, now: float) -> AuthorityTime:
        return AuthorityTime(self._clock(now))

    # ------------------------------------------------------------ sessions

    def _peer_up(self, event: PeerUp, now: float) -> None:
        self.state.sessions.up(event.peer, event.address, now)

    def _peer_down(self, event: PeerDown, now: float) -> None:
        self.state.sessions.down(event.peer, event.dial_failed, now)
        self.state.gifts.lost(event.peer)
        self.state.exchange.detached(event.peer, None, self.state.effects)

    def _heard(self, event: Heard, now: float) -> None:
        session = self.state.sessions.get(event.peer)
        if session is None or session.closing:
            return
        session.heard_at = now
        try:
            self._dispatch(session, event.message, now)
        except PeerError as error:
            self.state.close(event.peer, str(error), BAN_S)

    def _dispatch(self, session: Session, message: Message, now: float) -> None:
        if isinstance(message, Join):
            self._join(session, message, now)
        elif isinstance(message, Hello):
            self._hello(session, message, now)
        elif not session.ready:
            raise PeerError(f"{type(message).__name__}: before hello")
        elif type(message) in self._says:
            self._says[type(message)](session, message, now)
        else:
            raise PeerError(f"{type(message).__name__}: not for the authority")

    def _join(self, session: Session, message: Join, now: float) -> None:
        """Admit, make the grant durable, and only then say welcome. Who asks again sooner than a heartbeat is not
        heard; who asks again with a lease that is good (our welcome was lost) is welcomed to it."""
        peer = session.peer
        if now - session.asked_at < self.state.tuning.heartbeat_s or peer in self._awaiting.values():
            return
        session.asked_at = now
        if session.ready and self.book.slot_of.get(peer) == session.slot:
            self._welcome(session)
            return
        try:
            capability = open_capability(message.capability, self.state.swarm)
        except PeerError:
            self.state.send(
                peer, Refused("capability", "This ticket is not one of this swarm: ask its trainer for one.")
            )
            return
        lease = self.book.admit(capability, peer, self._time(now))
        if isinstance(lease, str):
            self.state.send(peer, Refused("ticket", lease))
            return
        enrolment = self._enrolled[peer] = Enrolment(message, session.address)
        token = f"grant/{lease.grant.slot}/{lease.grant.serial}"
        self._awaiting[token] = peer
        self._enrolled.probe(peer, now)
        self.state.emit(Persist(token, f"grant/{lease.grant.slot}", record_of(lease.sealed, enrolment)))

    def _persisted(self, event: Persisted, now: float) -> None:
        """A grant is on disk. A crowd that comes together is planned for, and welcomed, together."""
        peer = self._awaiting.pop(event.token, None)
        if peer is not None:
            self._welcoming.append(peer)
            self._stale_plan = True
            self._plan_if_due(now)

    def _welcome_all(self, now: float) -> None:
        welcoming, self._welcoming = self._welcoming, []
        if welcoming:
            self._beat(now)
        for peer in welcoming:
            slot, session = self.book.slot_of.get(peer), self.state.sessions.get(peer)
            if slot is not None and session is not None:
                session.ready, session.slot = True, slot
                self._welcome(session)
                self.state.notify("member_joined", peer=peer, slot=slot, name=self._enrolled[peer].join.name)

    def _welcome(self, session: Session) -> None:
        assert session.slot is not None
        state, sealed = self.state, self.book.leases[session.slot].sealed
        state.send(session.peer, Welcome(sealed, state.sealed_roster, state.leases.sealed, state.sealed_manifest))

    def _hello(self, session: Session, message: Hello, now: float) -> None:
        """A member comes back, with a grant of this or an earlier boot."""
        grant = open_grant(message.grant, self.state.swarm) if message.grant else None
        if grant is not None and grant.peer != session.peer:
            raise PeerError("grant: of another peer")
        if grant is None or not self._current(grant):
            self.state.send(session.peer, Refused("unknown", "Your lease is over: join again with your ticket."))
            return
        session.ready, session.slot = True, grant.slot
        enrolment = self._enrolled[session.peer]
        if session.address not in (None, enrolment.seen_at):
            enrolment.seen_at = session.address
            self._enrolled.probe(session.peer, now)
        head = self.state.held or VersionId(0, 0)
        state = self.state
        roster = state.roster.stamp if state.roster is not None else 0
        beat = state.leases.heartbeat.stamp if state.leases.heartbeat is not None else 0
        state.send(session.peer, Hello(b"", roster, beat, head.epoch, head.version))
        share_news(self.state, session.peer, message)

    def _current(self, grant: Grant) -> bool:
        lease = self.book.leases.get(grant.slot)
        return lease is not None and lease.grant == grant

    def _bye(self, session: Session, message: Bye, now: float) -> None:
        report = open_report(message.release, self.state.swarm)
        if report.peer != session.peer or not report.leaving:
            raise PeerError("bye: not the sender's own")
        self._take_report(report, now)
        self.state.close(session.peer, "left")

    def _rival(self, session: Session, message: HeartbeatNews, now: float) -> None:
        """A member shows us a heartbeat of our own key: if it is of a later boot, somebody replaced us, so we stop."""
        self.state.leases.hear(message.heartbeat, self.state.swarm, now)
        heartbeat = self.state.leases.heartbeat
        if heartbeat is not None and heartbeat.boot > self.boot:
            self.superseded = True
            self.state.notify("superseded", boot=heartbeat.boot)

    # ------------------------------------------------------------ leases and plans

    def _reports(self, session: Session, message: Reports, now: float) -> None:
        for sealed in message.reports:
            report = open_report(sealed, self.state.swarm)
            lease = self.book.leases.get(report.slot)
            current = lease is not None and (lease.grant.peer, lease.grant.serial) == (report.peer, report.grant)
            if current:
                self._take_report(report, now)
            elif report.peer == session.peer:  # an old one that others show us says nothing of how it stands today
                self.state.send(report.peer, Refused("unknown", "Your lease is over: join again with your ticket."))
                self.state.close(report.peer, "its lease is over")
                return

    def _take_report(self, report: Report, now: float) -> None:
        lease = self.book.leases.get(report.slot)
        before = lease.report if lease is not None else None
        if not self.book.renew(report, self._time(now)):
            return
        if report.leaving:
            self._freed(report.slot, report.peer)
            self.state.notify("member_left", peer=report.peer, slot=report.slot)
            return
        enrolment = self._enrolled.get(report.peer)
        if report.catching_up >= 1 and enrolment is not None and not enrolment.held_once:
            enrolment.held_once = True
            self._stale_plan = True
        if before is None or before.held != report.held:
            self.state.notify("held", slot=report.slot, peer=report.peer, version=report.held)
        for slot in report.lost:
            self._hear_of_loss(slot, now)

    def _hear_of_loss(self, slot: int, now: float) -> None:
        """Hearsay only moves edges: a slot that somebody lost, and that is late itself, stands outside for a while."""
        lease = self.book.leases.get(slot)
        if lease is None or slot in self._lost:
            return
        if self._time(now) - lease.renewed > 2 * self.state.tuning.heartbeat_s:
            self._lost[slot] = now
            self._stale_plan = True

    def _freed(self, slot: int, peer: bytes) -> None:
        """A lease has ended: nothing is kept of its holder, in memory or on disk."""
        self._lost.pop(slot, None)
        self._enrolled.pop(peer, None)
        self._stale_plan = True
        self.state.emit(Persist(f"release/{slot}", f"grant/{slot}", b""))

    def _restore(self, records: list[bytes], now: float) -> None:
        """Take up the leases of an earlier boot."""
        opened = [open_record(record) for record in records]
        self.book.restore([sealed for sealed, _ in opened], self._time(now))
        for sealed, enrolment in opened:
            grant = open_grant(sealed, self.state.swarm)
            if self._current(grant):
                self._enrolled[grant.peer] = enrolment

    def _is_head(self, stripe: int, peer: bytes) -> bool:
        roster = self.state.roster
        member = roster.member_of(peer) if roster is not None else None
        return roster is not None and member is not None and roster.parent(stripe, member.slot) == AUTHORITY

    def _member(self, slot: int, now: float) -> Member:
        peer = self.book.leases[slot].grant.peer
        enrolment = self._enrolled[peer]
        fresh = self.book.standing(slot, self._time(now)) is Standing.FRESH and slot not in self._lost
        leaf = not fresh or not enrolment.held_once or enrolment.join.up_mbit == 0
        return enrolment.member(slot, peer, leaf=leaf)

    @property
    def place(self) -> Place:
        """Where we stand ourselves."""
        return Place(self.addrs, Scope.HERE)

    def _probed(self, event: Probed, now: float) -> None:
        """A member was dialed back: durable, and everyone is told, when it answered elsewhere than before."""
        slot = self.book.slot_of.get(event.peer)
        if self._enrolled.probed(event) and slot is not None:
            record = record_of(self.book.leases[slot].sealed, self._enrolled[event.peer])
            self.state.emit(Persist(f"reach/{slot}", f"grant/{slot}", record))
            self._stale_plan = True
            self._plan_if_due(now)

    def _plan_if_due(self, now: float) -> None:
        if self._stale_plan and now - self._planned_at >= self.state.tuning.tick_s:
            self._plan(now)

    def _plan(self, now: float) -> None:
        members = [self._member(slot, now) for slot in sorted(self.book.leases)]
        self._roster_serial += 1
        self._stale_plan = False
        self._planned_at = now
        state = self.state
        parents = plan(members, state.tuning.stripes)
        state.roster = Roster(state.swarm, self.boot, self._roster_serial, self.addrs, tuple(members), parents)
        state.sealed_roster = seal_roster(state.roster, state.key)
        for session in state.sessions:
            if session.ready:
                state.send(session.peer, RosterNews(state.sealed_roster))
        state.notify("planned", serial=self._roster_serial, members=len(members))
        self._welcome_all(now)

    def _beat(self, now: float) -> None:
        """Speak: authority time, head, and who lives. Sent to the heads; they pass it on."""
        state = self.state
        time = self._time(now)
        live, fresh = self.book.bits(time)
        self._beat_serial += 1
        head = state.held or VersionId(0, 0)
        beat = Heartbeat(state.swarm, self.boot, self._beat_serial, time, self._roster_serial, *head, live, fresh)
        sealed = seal(beat, state.key)
        self.book.beat(sealed, time)
        state.leases.hear(sealed, state.swarm, now)
        self._next_beat = now + state.tuning.heartbeat_s
        for peer in state.children():
            state.send(peer, HeartbeatNews(sealed))

    # ------------------------------------------------------------ versions

    def _local_chunk(self, event: LocalChunk, now: float) -> None:
        taken = self.state.chunks.header(event.header, now, self.state.effects)
        if taken is None:
            return
        chunk, news = taken
        if news:
            self.state.chunks.versions[VersionId(chunk.key.epoch, chunk.key.version)].fill(chunk)
            self.dealer.add(chunk)

    def _stored_before(self, event: HeaderStored, now: float) -> None:
        """After a restart: a chunk of a sealed version that the store still has, whole. Served to whoever pulls it."""
        taken = self.state.chunks.header(event, now, self.state.effects)
        if taken is not None and taken[1]:
            key = taken[0].key
            self.state.chunks.versions[VersionId(key.epoch, key.version)].fill(taken[0])

    def abandon(self, key: ChunkKey) -> None:
        """The attempt that `key` names will not be sealed: deal no more of it."""
        self.dealer.forget((key.epoch, key.version, key.attempt))

    def _local_seal(self, event: LocalSeal, now: float) -> None:
        state = self.state
        manifest = open_manifest(event.manifest, state.swarm)
        id_ = VersionId(manifest.epoch, manifest.version)
        state.chunks.manifest(manifest, event.manifest, now, state.effects)
        state.settle(id_, manifest, event.manifest)
        self.dealer.prune()
        for peer in state.children():
            state.send(peer, ManifestNews(event.manifest))
        state.emit(Announce(event.manifest))
        self._beat(now)

    def _attach(self, session: Session, message: Attach, now: float) -> None:
        if message.stripe >= self.state.tuning.stripes:
            return  # of a roster of another boot: it will move
        self.state.exchange.attached(session.peer, message, now, self.state.effects)
        self.state.send(session.peer, HeartbeatNews(self.state.leases.sealed))

    def _credit(self, session: Session, message: Credit, now: float) -> None:
        self.state.exchange.credited(session.peer, message, now, self.state.effects)

    # ------------------------------------------------------------ time

    def _tick(self, event: Timer, now: float) -> None:
        state = self.state
        state.sessions.expire_mute(now, state.effects)
        state.exchange.tick(now, state.effects)
        before = state.leases.heartbeat.fresh if state.leases.heartbeat is not None else b""
        for slot, peer in self.book.expire(self._time(now)):
            self._freed(slot, peer)
            state.notify("lease_expired", slot=slot, peer=peer)
            if state.sessions.get(peer) is not None:
                state.close(peer, "its lease has expired")
        if self.book.bits(self._time(now))[1] != before:
            self._stale_plan = True
        for slot in [s for s, at in self._lost.items() if now - at > state.tuning.soft_ttl_s]:
            del self._lost[slot]
            self._stale_plan = True
        self._plan_if_due(now)
        self._enrolled.probe_due(now)
        reach_out(state, AUTHORITY, self.place, now)
        if now >= self._next_beat:
            self._beat(now)
        state.emit(SetTimer("tick", now + state.tuning.tick_s))
