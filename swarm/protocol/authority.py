"""The trainer's end: it admits members, plans the trees, sends heartbeats, assigns chunks to stripes, and seals.

It trusts nothing but its own key. Its machines:

which peers are members .... membership.admission, over membership.lease.LeaseBook
the authority's clock ...... membership.heartbeats
the trees .................. topology.replanning.Replanner, planned anew when membership changes
which stripe gets a chunk .. transfer.assignment
pieces to the root children  transfer.exchange
"""

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from codec import open_manifest
from codec.errors import PeerError
from codec.sign import Key
from swarm.protocol.core.documents import (
    AuthorityTime,
    Capability,
    Report,
    claimed_reporter,
    open_report,
    seal,
)
from swarm.protocol.core.events import (
    Announce,
    Drop,
    Effect,
    Event,
    Gave,
    HeaderStored,
    Heard,
    LocalAbandon,
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
)
from swarm.protocol.core.notices import LeaseExpired, MemberHolds, MemberLeft, Superseded, WorkHeard
from swarm.protocol.core.reach import Location, Scope
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import (
    Attach,
    Bye,
    Credit,
    Detach,
    HeartbeatNews,
    Hello,
    Join,
    Lacks,
    ManifestNews,
    Message,
    Ping,
    Pong,
    Refused,
    Reports,
    RosterNews,
    RosterStep,
    Skip,
    Succession,
    WantBlob,
    WantBlock,
    WantChunk,
    WantManifest,
    WantRoster,
    Work,
)
from swarm.protocol.membership.admission import Admission
from swarm.protocol.membership.enrolment import Enrolments, record_of
from swarm.protocol.membership.greeting import give_roster, reach_out
from swarm.protocol.membership.heartbeats import Heartbeats
from swarm.protocol.membership.lease import LeaseBook, Standing
from swarm.protocol.membership.report_limits import REPORTS_TAKEN, may_verify
from swarm.protocol.membership.roster import AUTHORITY
from swarm.protocol.membership.session import BAN_S, Session, pay_for_attaching
from swarm.protocol.membership.surplus import close_surplus_sessions
from swarm.protocol.startup import Boot, Budget, Saved, Site
from swarm.protocol.state import OwnUplink, State
from swarm.protocol.topology.replanning import Replanner
from swarm.protocol.transfer.assignment import ChunkAssigner
from swarm.protocol.transfer.bootstrap_limiter import BootstrapLimiter
from swarm.protocol.transfer.chunks import key_of
from swarm.protocol.transfer.egress import Egress
from swarm.protocol.transfer.serving import serve_manifest

__all__ = ["Authority"]

MEMBERS_DIALED = 4
"""Members that an authority dials after a restart when none comes back by itself: one of them suffices."""


class Authority:
    """Everything that the trainer's seed decides. Pure: `apply(event, now)` returns effects."""

    def __init__(
        self,
        key: Key,
        tuning: Tuning,
        rng: random.Random,
        boot: Boot,
        saved: Saved,
        site: Site = Site(),  # noqa: B008 - frozen
        budget: Budget | None = None,
        *,
        now: float = 0.0,
    ) -> None:
        """`budget`: what may be sent; None: no limit."""
        budget = budget or Budget(Egress())
        self.egress = budget.egress
        uplink = OwnUplink(bytes_s=lambda: site.up_mbit * 125_000, egress=budget.egress)
        state = self.state = State.new(
            key, key.public, tuning, rng, uplink, latest_boot=boot.latest, succession=saved.succession
        )
        self._cost_bytes = budget.cost_bytes
        copies = budget.egress.copies
        whole_copies = tuning.bootstrap_members if copies is None else int(copies)
        self._bootstrap_limiter = BootstrapLimiter(
            min(tuning.bootstrap_members, whole_copies), tuning.request_deadline_s
        )
        self.boot = boot.number

        def time(now: float) -> AuthorityTime:
            return AuthorityTime(boot.clock(now))

        self._time = time
        # Serials of this boot are higher than any that an earlier boot can have given, also to leases that are over.
        self.book = LeaseBook(key.public, key, tuning, next_serial=boot.number << 32)
        self._enrolled = Enrolments(state.outbox)
        replanner = self.replanner = Replanner(state, self.book, self._enrolled, time, boot=boot.number, site=site)
        self._heartbeats = Heartbeats(state, self.book, time, lambda: replanner.serial, boot=boot.number, now=now)
        self.admission = Admission(
            state, self.book, self._enrolled, self.replanner, time, self._heartbeats,
            shards=site.shards, formats=site.formats,
        )  # fmt: skip
        self.admission.restore(saved.grants, saved.tickets, saved.bars, now)
        self._alone_since: float | None = now if self._enrolled else None
        """Local time of our start, until a member of an earlier boot comes back; None: one has, or there is none."""
        self._began, self._earlier = time(now), set(self._enrolled)
        """Our start, and the members of earlier boots that have not renewed their leases since."""
        self.assigner = ChunkAssigner(state.exchange, state.chunks, self.replanner.is_root_child)
        self.superseded = False
        """A later boot of our own key is running: this one ignores all further events."""
        manifest = open_manifest(saved.head, key.public)
        state.set_held(VersionId(manifest.epoch, manifest.version), manifest, saved.head)
        self._on_event = self._events()
        self._on_message = self._messages()

    def _events(self) -> dict[type[Event], Callable[[Any, float], None]]:
        return {
            PeerUp: self._peer_up,
            PeerDown: self._peer_down,
            Heard: self._heard,
            HeaderStored: self._stored_before,
            PieceBad: lambda e, now: self.state.close(e.peer, e.what, BAN_S),
            SendDone: self.state.sent,
            Gave: lambda e, now: self.admission.charge_served(e.peer, e.size_bytes, now),
            Persisted: self._persisted,
            Probed: self._probed,
            LocalAbandon: self._local_abandon,
            LocalChunk: self._local_chunk,
            LocalSeal: self._local_seal,
            Timer: self._tick,
        }

    def _messages(self) -> dict[type, Callable[[Session, Any, float], None]]:
        return {
            Reports: self._reports,
            Attach: self._attach,
            Detach: lambda s, m, now: self.state.exchange.detached(s.peer, m.stripe),
            Credit: lambda s, m, now: self.state.exchange.credited(s.peer, m, now),
            Skip: lambda s, m, now: self.state.exchange.skip(s.peer, m.stripe, key_of(m)),
            WantChunk: lambda s, m, now: self.state.uploads.serve(s.peer, m, now),
            WantBlob: self._serve_model,
            WantBlock: self._serve_model,
            WantManifest: lambda s, m, now: serve_manifest(self.state, s.peer, m),
            WantRoster: lambda s, m, now: give_roster(self.state, s, m, now),
            Ping: lambda s, m, now: self.state.outbox.send(s.peer, Pong(m.nonce)),
            Work: lambda s, m, now: self.state.outbox.notify(WorkHeard(s.peer, m.body)),
            Bye: self._bye,
            Succession: lambda s, m, now: None,
            HeartbeatNews: self._rival,
            RosterNews: lambda s, m, now: None,
            RosterStep: lambda s, m, now: None,
            ManifestNews: lambda s, m, now: None,
        }

    def start(self, now: float, addrs: tuple[str, ...] = ()) -> list[Effect]:
        """The first effects. `addrs`: where we listen; used if no addresses were given to the constructor."""
        self.replanner.listening(addrs)
        self._tick(Timer("tick"), now)
        return self.state.outbox.take()

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; return its effects."""
        if not self.superseded and type(event) in self._on_event:
            self._on_event[type(event)](event, now)
            self.assigner.assign(now)
        return self.state.outbox.take()

    @property
    def addrs(self) -> tuple[str, ...]:
        """Where the authority can be dialed from outside."""
        return self.replanner.addrs

    @property
    def down_mbits(self) -> tuple[float, ...]:
        """The downlinks, in Mbit/s, that members with a replica named when they joined, in the order of slots."""
        joins = (self._enrolled[lease.grant.peer].join for _, lease in sorted(self.book.leases.items()))
        return tuple(join.down_mbit for join in joins if not join.relay_only)

    def invite(self, capability: Capability) -> bytes:
        """Sign a capability, for a ticket."""
        return seal(capability, self.state.key)

    def kick(self, peer: bytes, now: float) -> list[Effect]:
        """Remove a member: end its lease now, and admit it no more for ten minutes."""
        self.admission.kick(peer, now)
        return self.state.outbox.take()

    def revoke(self, ticket: bytes, now: float, *, undo: bool = False) -> list[Effect]:
        """Revoke the ticket of this id: it admits no peer any more, and members that used it are removed. Durable once
        the effects are done. `undo`: the ticket is valid again."""
        self.admission.revoke(ticket, now, undo=undo)
        return self.state.outbox.take()

    def bar(self, peer: bytes, now: float, *, undo: bool = False) -> list[Effect]:
        """Bar a peer: no ticket admits it any more, and its lease ends. Durable once the effects are done. `undo`:
        tickets admit it again."""
        self.admission.bar(peer, now, undo=undo)
        return self.state.outbox.take()

    def standing(self, slot: int, now: float) -> Standing:
        """Where the lease of `slot` stands."""
        return self.book.standing(slot, self._time(now))

    def lease_left_s(self, slot: int, now: float) -> float:
        """Seconds until the lease of `slot` ends if its holder is not heard of again."""
        return self.book.left_s(slot, self._time(now))

    # ------------------------------------------------------------ sessions

    def admits(self, peer: bytes) -> bool:
        """Whether `peer` has shown a valid grant: it may then send content, and gossip."""
        return self.state.sessions.ready(peer)

    def knows(self, peer: bytes) -> bool:
        """Whether `peer` holds a lease, shown or not, so that limits on strangers do not apply to it."""
        return peer in self.book.slot_of

    def _peer_up(self, event: PeerUp, now: float) -> None:
        self.state.sessions.up(event.peer, event.address, now)
        self.egress.peer_connected(event.peer)

    def _peer_down(self, event: PeerDown, now: float) -> None:
        self.state.sessions.down(event.peer, event.dial_failed, now)
        self.state.uploads.lost(event.peer)
        self._bootstrap_limiter.done(event.peer)
        self.state.exchange.detached(event.peer, None)
        if not event.dial_failed:
            self.egress.peer_left(event.peer)

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
            self.admission.join(session, message, now)
        elif isinstance(message, Hello):
            self.admission.hello(session, message, now)
        elif not session.ready:
            raise PeerError(f"{type(message).__name__}: before hello")
        elif type(message) in self._on_message:
            self._on_message[type(message)](session, message, now)
        else:
            raise PeerError(f"{type(message).__name__}: not for the authority")

    def _persisted(self, event: Persisted, now: float) -> None:
        if self.admission.persisted(event):
            self._plan_if_due(now)

    def _bye(self, session: Session, message: Bye, now: float) -> None:
        report = open_report(message.release, self.state.swarm)
        if report.peer != session.peer or not report.leaving:
            raise PeerError("bye: not the sender's own")
        self._take_report(report, now)
        if not session.closing:
            self.state.close(session.peer, "left")

    def _rival(self, session: Session, message: HeartbeatNews, now: float) -> None:
        """A member shows us a heartbeat signed by our own key. If it names a later boot we have been replaced, and
        stop."""
        self.state.leases.hear(message.heartbeat, self.state.swarm, now, self.state.latest_boot(now))
        heartbeat = self.state.leases.heartbeat
        if heartbeat is not None and heartbeat.boot > self.boot and not self.state.succession:
            self.superseded = True
            self.state.outbox.notify(Superseded(heartbeat.boot))

    # ------------------------------------------------------------ leases and plans

    def _reports(self, session: Session, message: Reports, now: float) -> None:
        """Take the renewals that a member brings. A forged one is held against the bearer, since members verify what
        they pass on. One of an unknown author, which may have left meanwhile, is dropped before it is verified."""
        for sealed in message.reports[:REPORTS_TAKEN]:
            author = claimed_reporter(sealed)
            slot = self.book.slot_of.get(author)
            if slot is None and author != session.peer:
                continue
            if not may_verify(session, len(self.book.leases), self.state.tuning.heartbeat_s, now):
                return
            report = open_report(sealed, self.state.swarm)
            lease = self.book.leases.get(report.slot)
            current = lease is not None and (lease.grant.peer, lease.grant.serial) == (report.peer, report.grant)
            if current:
                self._take_report(report, now)
            elif report.peer == session.peer:
                # Brought by another member, an old report would not show that its author still uses that lease.
                refusal = Refused("unknown", "Your lease is over: join again with your ticket.")
                self.state.outbox.send(report.peer, refusal)
                self.state.close(report.peer, "its lease is over")
                return

    def _take_report(self, report: Report, now: float) -> None:
        if not self.book.renew(report, self._time(now)):
            return
        if report.leaving:
            self.admission.forget_holder(report.slot, report.peer)
            session = self.state.sessions.get(report.peer)
            if session is not None and not session.closing:  # another member may have brought the report
                self.state.close(report.peer, "left")
            self.state.outbox.notify(MemberLeft(report.peer, report.slot))
            return
        self.admission.charge_reported(report, now)
        enrolment = self._enrolled.get(report.peer)
        if enrolment is None:
            return  # the quota of its ticket is used up, so it has been removed
        if enrolment.saving != report.saving:
            enrolment.saving = report.saving
            self.replanner.mark_stale()
        if report.catching_up >= 1:
            self._bootstrap_limiter.done(report.peer)
        if report.catching_up >= 1 and not enrolment.held_once:
            enrolment.held_once = True
            self.replanner.mark_stale()
        if self._is_news(enrolment.newest, report.held):
            enrolment.newest = report.held
            self.state.outbox.notify(MemberHolds(report.slot, report.peer, report.held))
        self.replanner.hear(report, now)
        for slot in report.lost:
            self.replanner.hear_of_loss(slot, now)

    def _is_news(self, before: VersionId | None, held: VersionId) -> bool:
        """Whether a member says for the first time that it holds this version. True once a version, whatever the member
        reports in between, since each time is a line of the log."""
        newest = self.state.held or VersionId(0, 0)
        return held <= newest and (before is None or held > before)

    def _probed(self, event: Probed, now: float) -> None:
        """A member was dialed back. If it answered at other addresses than before, make them durable and plan anew."""
        slot = self.book.slot_of.get(event.peer)
        if self._enrolled.probed(event) and slot is not None:
            record = record_of(self.book.leases[slot].sealed, self._enrolled[event.peer])
            self.state.outbox.emit(Persist(f"reach/{slot}", f"grant/{slot}", record))
            self.replanner.mark_stale()
            self._plan_if_due(now)

    def _plan_if_due(self, now: float) -> None:
        if self.replanner.plan_if_due(now):
            self.state.exchange.review(now)
            self.admission.welcome_all(now)

    def _look_for_members(self, now: float) -> None:
        """Dial a few members if none has come back since our start: we may listen at another address than before.
        Later, dial those of earlier boots whose leases are not fresh: nobody may have told them of it."""
        state = self.state
        if self._alone_since is None or any(session.ready for session in state.sessions):
            self._alone_since = None
            due = list(islice(self._unheard(now), MEMBERS_DIALED)) if self._earlier else []
        elif now - self._alone_since > 3 * state.tuning.heartbeat_s:
            due = sorted(peer for peer, each in self._enrolled.items() if each.dialed)[:MEMBERS_DIALED]
        else:
            due = []
        for peer in due:
            state.sessions.reach(peer, self._enrolled[peer].dialed, now)

    def _unheard(self, now: float) -> Iterator[bytes]:
        """Members of earlier boots that can be dialed and have let their leases become soft since our start."""
        for peer in sorted(self._earlier):
            slot, enrolment = self.book.slot_of.get(peer), self._enrolled.get(peer)
            if slot is None or enrolment is None or self.book.leases[slot].renewed > self._began:
                self._earlier.discard(peer)
            elif (
                enrolment.dialed and self.state.sessions.get(peer) is None and self.standing(slot, now) is Standing.SOFT
            ):
                yield peer

    # ------------------------------------------------------------ versions

    def _local_chunk(self, event: LocalChunk, now: float) -> None:
        taken = self.state.chunks.header(event.header, now)
        if taken is None:
            return
        chunk, news = taken
        if news:
            self.state.chunks.versions[VersionId(chunk.key.epoch, chunk.key.version)].fill(chunk)
            self.egress.add_chunk(chunk.key, chunk.header_bytes + sum(chunk.sizes))
            self.replanner.opened()
            self.assigner.add(chunk)

    def _serve_model(self, session: Session, want: WantBlob | WantBlock, now: float) -> None:
        """Answer a member that catches up and finds no other member that has the block, list or file."""
        may = not isinstance(want, WantBlock) or self._bootstrap_limiter.admits(session.peer, now)
        may = may and not self.state.succession  # the member will ask in the new swarm
        if not may or not self.egress.pay_for_model(self._cost_bytes(want)):
            self.state.outbox.send(session.peer, Lacks(want.request))
        elif isinstance(want, WantBlock):
            self.state.outbox.emit(SendBlock(session.peer, want.request, want.block))
        else:
            self.state.outbox.emit(SendBlob(session.peer, want.request, want.kind, want.name, want.offset))

    def _stored_before(self, event: HeaderStored, now: float) -> None:
        """After a restart, the store has a whole chunk of a sealed version: members may pull it."""
        taken = self.state.chunks.header(event, now)
        if taken is not None and taken[1]:
            key = taken[0].key
            self.state.chunks.versions[VersionId(key.epoch, key.version)].fill(taken[0])

    def _local_abandon(self, event: LocalAbandon, now: float) -> None:
        """An attempt will not be sealed: no chunk of it is assigned or sent any more, and the plan may change."""
        state, id_ = self.state, event.version
        self.assigner.forget((id_.epoch, id_.version, event.attempt))
        version = state.chunks.version(id_)
        if version is not None and version.attempt == event.attempt:
            state.chunks.drop(id_)
            state.exchange.forget(id_)
        self.replanner.abandoned()
        state.outbox.emit(Drop(id_, event.attempt))

    def _local_seal(self, event: LocalSeal, now: float) -> None:
        state = self.state
        manifest = open_manifest(event.manifest, state.swarm)
        id_ = VersionId(manifest.epoch, manifest.version)
        state.chunks.manifest(manifest, event.manifest, now)
        state.set_held(id_, manifest, event.manifest)
        self.assigner.prune()
        self.replanner.sealed(now)
        for peer in state.children():
            state.outbox.send(peer, ManifestNews(event.manifest))
        state.outbox.emit(Announce(event.manifest))
        self._heartbeats.send(now)

    def _attach(self, session: Session, message: Attach, now: float) -> None:
        pay_for_attaching(session, len(message.have), now)
        if message.stripe >= self.state.tuning.stripes:
            return  # it follows the roster of another boot, and will attach elsewhere when it has ours
        self.state.exchange.attached(session.peer, message, now)
        self.state.outbox.send(session.peer, HeartbeatNews(self.state.leases.sealed))

    # ------------------------------------------------------------ time

    def _tick(self, event: Timer, now: float) -> None:
        state = self.state
        state.sessions.close_unproven(now)
        before = state.leases.heartbeat.fresh if state.leases.heartbeat is not None else b""
        for slot, peer in self.book.expire(self._time(now)):
            self.admission.forget_holder(slot, peer)
            state.outbox.notify(LeaseExpired(slot, peer))
            if state.sessions.get(peer) is not None:
                state.close(peer, "its lease has expired")
        state.exchange.tick(now)
        if self.book.bits(self._time(now))[1] != before:
            self.replanner.mark_stale()
        self.replanner.tick(now)
        self._plan_if_due(now)
        self._enrolled.probe_due(now)
        close_surplus_sessions(state, now)
        self._look_for_members(now)
        reach_out(state, AUTHORITY, Location(self.replanner.addrs, Scope.HERE), now)
        self._heartbeats.send_if_due(now)
        state.outbox.emit(SetTimer("tick", now + state.tuning.tick_s))
