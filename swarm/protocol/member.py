"""A member of the swarm: wires its machines together, and applies one event at a time.

documents, sessions, parents, reports ...... membership.Membership, membership.renewals
pieces in and out, credit .................. transfer.exchange, over transfer.chunks
late chunks, ours and our neighbours' ....... transfer.repair
whole chunks -> scratch -> replica ......... transfer.staging.Progress
from nothing to a version .................. transfer.catchup
"""

import random
from collections.abc import Callable
from typing import Any

from codec import open_manifest
from codec.errors import PeerError
from codec.formats.share import share_of
from codec.sign import Key
from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.documents import open_report
from swarm.protocol.core.events import (
    Damaged,
    Effect,
    Event,
    Gave,
    HeaderStored,
    Heard,
    JobDone,
    JobKind,
    LocalBudget,
    LocalLeave,
    ManifestSeen,
    PartsDone,
    PeerDown,
    PeerUp,
    PieceBad,
    PieceStored,
    SendBlob,
    SendBlock,
    SendDone,
    SetTimer,
    Stray,
    Timer,
    UnknownLabel,
)
from swarm.protocol.core.notices import AuthorityUnreachable, BadBytes, ReplicaDamaged, WorkHeard
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
    LacksChunk,
    LateChunkWants,
    ManifestNews,
    Offer,
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
    Welcome,
    Work,
)
from swarm.protocol.membership.greeting import give_roster
from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.membership import Membership
from swarm.protocol.membership.session import BAN_S, Session, pay_for_attaching
from swarm.protocol.membership.succession import SuccessionRelay
from swarm.protocol.membership.surplus import close_spare_sessions
from swarm.protocol.startup import SavedReplica
from swarm.protocol.state import OwnUplink, State
from swarm.protocol.transfer.catchup import Catchup, Phase
from swarm.protocol.transfer.chunks import key_of
from swarm.protocol.transfer.links import Links
from swarm.protocol.transfer.repair.repair import Repair
from swarm.protocol.transfer.serving import serve_manifest
from swarm.protocol.transfer.sources import block_sources
from swarm.protocol.transfer.staging import Progress

__all__ = ["REST_TICKS", "Peer"]

REST_TICKS = 4
"""While nothing is under way, deadlines are checked each so many `Tuning.tick_s`: once a second in a swarm over the
internet. What is left to check then (silent parents, the own lease, dials to repeat) takes several seconds anyway."""
_CANNOT_ADVANCE = (HeaderStored, PieceStored, SendDone)
"""The most frequent events, after which staging is not asked whether it can go on: a piece that completes its chunk
asks by itself."""


class Peer:
    """Everything that one member decides. Pure: `apply(event, now)` returns effects."""

    def __init__(
        self,
        key: Key,
        swarm: bytes,
        authority: tuple[str, ...],
        join: Join,
        tuning: Tuning,
        rng: random.Random,
        saved: SavedReplica = SavedReplica(),  # noqa: B008 - frozen
        *,
        latest_boot: Callable[[float], int] = lambda now: MAX_BOOT,
    ) -> None:
        """`authority`: addresses of the authority. `join`: what this member says of itself when it joins.
        `latest_boot`: at a local time, the highest boot number of the authority that is believed."""
        shard = share_of(join.shards, join.ranks, join.form)
        state = self.state = State.new(
            key, swarm, tuning, rng, OwnUplink(gives=False), latest_boot=latest_boot, shard=shard
        )
        state.may_attach = shard is None or saved.layout_hash is not None
        self.repair = Repair(state)
        self.membership = Membership(state, join, authority)
        self.catchup = Catchup(state)
        self._relay_only = join.relay_only
        self.progress = Progress(state, self.repair, relay_only=join.relay_only, on_damage=self.catchup.repair)
        self.links = Links(state)
        self.succession_relay = SuccessionRelay(state)
        self._rests = False
        """Nothing was under way at the last tick, so the next one is `REST_TICKS` later."""
        self._tick_at = 0.0
        """Local time of the next tick."""
        if saved.layout_hash is not None:
            self.catchup.has_layout(saved.layout_hash)
        if saved.held is not None:
            manifest = open_manifest(saved.held, swarm)
            self.state.set_held(VersionId(manifest.epoch, manifest.version), manifest, saved.held)
        self._on_event: dict[type[Event], Callable[[Any, float], None]] = {
            PeerUp: self._peer_up,
            PeerDown: self._peer_down,
            Heard: self._heard,
            HeaderStored: self.progress.header,
            PieceStored: self._piece,
            Stray: lambda e, now: self.state.exchange.parents.arrived(e.peer, e.stripe, e.size, now),
            PieceBad: self._piece_bad,
            PartsDone: self._parts_done,
            Gave: lambda e, now: self.membership.renewals.gave(e.peer, e.size_bytes),
            UnknownLabel: self.catchup.unknown_label,
            SendDone: self._send_done,
            ManifestSeen: self._manifest_seen,
            JobDone: self._job_done,
            Damaged: self._damaged,
            Timer: self._tick,
            LocalBudget: lambda e, now: self.membership.budget(e.saving, e.spent, now),
            LocalLeave: lambda event, now: self.membership.leave(now),
        }
        self._on_message: dict[type, Callable[[Session, Any, float], None]] = {
            HeartbeatNews: self._heartbeat,
            RosterNews: lambda s, m, now: self.membership.roster(m.roster, now),
            RosterStep: lambda s, m, now: self.membership.roster_step(s, m.change, now),
            WantRoster: lambda s, m, now: give_roster(self.state, s, m, now),
            ManifestNews: self._manifest_news,
            Reports: lambda s, m, now: self.membership.renewals.forward_reports(s, m, now),
            Attach: self._attach,
            Detach: lambda s, m, now: self.state.exchange.detached(s.peer, m.stripe),
            Credit: self._credit,
            WantChunk: lambda s, m, now: self.repair.asked_for(s.peer, m, now),
            LateChunkWants: lambda s, m, now: self.repair.late_wants(s.peer, m, now),
            Offer: lambda s, m, now: self.repair.offered(s.peer, m, now),
            LacksChunk: lambda s, m, now: self.repair.lacks(s.peer, m),
            Skip: lambda s, m, now: self.state.exchange.skip(s.peer, m.stripe, key_of(m)),
            Ping: lambda s, m, now: self.state.outbox.send(s.peer, Pong(m.nonce)),
            Pong: self._pong,
            WantBlob: self._want_blob,
            WantBlock: self._want_block,
            Lacks: lambda s, m, now: self.catchup.lacks(s.peer, m.request, now),
            WantManifest: lambda s, m, now: serve_manifest(self.state, s.peer, m),
            Work: lambda s, m, now: self.state.outbox.notify(WorkHeard(s.peer, m.body)),
            Bye: self._bye,
        }

    def start(self, now: float, addrs: tuple[str, ...] = ()) -> list[Effect]:
        """The first effects: dial the authority, start the clock. `addrs`: where this member listens; addresses that
        the user announced are kept instead."""
        self.membership.listening(addrs)
        self._tick(Timer("tick"), now)
        return self.state.outbox.take()

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Apply one event; return its effects."""
        before, roster = self.state.held, self.state.roster
        self._on_event[type(event)](event, now)
        if self.state.roster is not roster:
            self.state.exchange.review(now)
        if not self.catchup.active and not isinstance(event, _CANNOT_ADVANCE):
            self.progress.advance(now)
        if self.state.held != before:
            self._report_version(now)
        if self._rests and self._is_busy:  # the next tick is where it would have been without the rest
            skipped = (self._tick_at - now) // self.state.tuning.tick_s
            self._set_tick(self._tick_at - max(0.0, skipped) * self.state.tuning.tick_s)
        return self.state.outbox.take()

    # ------------------------------------------------------------ sessions

    def admits(self, peer: bytes) -> bool:
        """Whether `peer` has shown a valid grant, or is the authority: it may then send content, and gossip."""
        return self.state.sessions.ready(peer)

    def knows(self, peer: bytes) -> bool:
        """Whether `peer` is the authority or stands in our roster, so that limits on strangers do not apply to it."""
        roster = self.state.roster
        return peer == self.state.swarm or (roster is not None and roster.member_of(peer) is not None)

    def _peer_up(self, event: PeerUp, now: float) -> None:
        self.membership.up(self.state.sessions.up(event.peer, event.address, now), now)

    def _peer_down(self, event: PeerDown, now: float) -> None:
        session = self.state.sessions.down(event.peer, event.dial_failed, now)
        never_began = event.dial_failed or (session is not None and not session.ready)
        if never_began and event.peer == self.state.swarm:
            self.state.outbox.notify(AuthorityUnreachable(event.why))
        self.repair.lost(event.peer)
        self.membership.lost(event.peer, session, now)
        self.catchup.lost(event.peer, now)
        if session is not None and session.slot is not None and not session.parted:
            self.state.lost_peers.session_ended(event.peer, now)
            self.state.exchange.review(now)

    def _attach(self, session: Session, message: Attach, now: float) -> None:
        pay_for_attaching(session, len(message.have), now)
        self.state.exchange.attached(session.peer, message, now)

    def _heard(self, event: Heard, now: float) -> None:
        session = self.state.sessions.get(event.peer)
        if session is None or session.closing:
            return
        session.heard_at = now
        try:
            self._dispatch(session, event.message, now)
        except PeerError as error:
            self._expel(event.peer, str(error))

    def _expel(self, peer: bytes, why: str) -> None:
        """Close the session and ban the peer. The authority is not banned: without it we could not come back."""
        self.state.close(peer, why, 0.0 if peer == self.state.swarm else BAN_S)

    def _dispatch(self, session: Session, message: Any, now: float) -> None:
        if isinstance(message, Hello):
            self.membership.hello(session, message, now)
            if self.state.lost_peers.greeted(session.peer):
                self.state.exchange.review(now)
        elif isinstance(message, Welcome):
            self.membership.welcome(session, message, now)
            if message.manifest:
                self._welcomed(message.manifest, now)
        elif isinstance(message, Refused):
            if session.peer == self.state.swarm:
                self.membership.refused(message.code, message.why, now)
        elif isinstance(message, Succession):
            self.succession_relay.heard(session.peer, message)
        elif not session.ready:
            raise PeerError(f"{type(message).__name__}: before hello")
        elif type(message) in self._on_message:
            self._on_message[type(message)](session, message, now)
        else:
            raise PeerError(f"{type(message).__name__}: not for a member")

    def _piece(self, event: PieceStored, now: float) -> None:
        self.links.count_bytes(event.peer, event.size_bytes, now)
        self.progress.piece(event, now)

    def _piece_bad(self, event: PieceBad, now: float) -> None:
        """A peer sent bytes that do not verify: we ban it. That is our own evidence; other peers are not told."""
        self.state.outbox.notify(BadBytes(event.peer, event.what))
        self._expel(event.peer, event.what)

    def _bye(self, session: Session, message: Bye, now: float) -> None:
        if session.peer == self.state.swarm:
            self.membership.stay_away(now)
        session.parted = not message.release
        if message.release:
            report = open_report(message.release, self.state.swarm)
            if report.peer != session.peer or not report.leaving:
                raise PeerError("bye: not the sender's own")
            self.membership.renewals.forward_release(session, message.release, now)
        self.state.close(session.peer, "has no use for the session" if session.parted else "left")

    # ------------------------------------------------------------ versions

    def _welcomed(self, sealed: bytes, now: float) -> None:
        """Take the head version that came with our admission: the target of a catch-up where there is no replica
        yet."""
        if self.state.held is None and not self.catchup.active:
            manifest = open_manifest(sealed, self.state.swarm)
            if self._relay_only:
                self.state.set_held(VersionId(manifest.epoch, manifest.version), manifest, sealed)
            else:
                self.catchup.start(manifest, sealed, now)
        else:
            self.progress.manifest(sealed, now, source=None)
        self.membership.rewire(now)

    def _pong(self, session: Session, message: Pong, now: float) -> None:
        self.state.sessions.pong(session, now)
        self.membership.answered(session, now)

    def _heartbeat(self, session: Session, message: HeartbeatNews, now: float) -> None:
        if self.membership.heartbeat(message.heartbeat, now) and not self.catchup.active:
            close_spare_sessions(self.state, self.repair.pulled_from(), now)

    def _manifest_news(self, session: Session, message: ManifestNews, now: float) -> None:
        if self.catchup.phase is Phase.CHAIN:
            self.catchup.chain_manifest(open_manifest(message.manifest, self.state.swarm), message.manifest, now)
        self.progress.manifest(message.manifest, now, source=session.peer)

    def _manifest_seen(self, event: ManifestSeen, now: float) -> None:
        """A manifest that did not come by a tree: a forged one changes nothing, since its sender is not known."""
        try:
            self.progress.manifest(event.manifest, now, source=None)
        except PeerError as error:
            self.state.outbox.notify(BadBytes(b"", str(error)))

    def _job_done(self, event: JobDone, now: float) -> None:
        if event.job.kind in (JobKind.OPEN, JobKind.REPLAY):
            self.catchup.done(event, now)
            if event.job.kind == JobKind.OPEN and event.ok and not self.state.may_attach:
                self.state.may_attach = True
                self.membership.rewire(now)
        else:
            self.progress.done(event, now)

    def _report_version(self, now: float) -> None:
        """Report at once, and not at the next heartbeat, that we hold another version."""
        self.membership.renewals.note_progress(self.caught_up)
        self.membership.report(now, links=self.links.take_measurements())

    def _damaged(self, event: Damaged, now: float) -> None:
        if self.state.held is not None:
            self.state.outbox.notify(ReplicaDamaged(self.state.held, f"{event.blocks} blocks"))
        self.catchup.repair(now)

    # ------------------------------------------------------------ chunks and blocks

    def _credit(self, session: Session, message: Credit, now: float) -> None:
        self.state.exchange.credited(session.peer, message, now)
        self.repair.use_spare_uplink(now)

    def _send_done(self, event: SendDone, now: float) -> None:
        self.state.sent(event, now)
        if event.pull:
            self.repair.use_spare_uplink(now)
            self.state.exchange.serve_late_joiners(now)

    def _want_blob(self, session: Session, message: WantBlob, now: float) -> None:
        if self.state.exchange.gives:
            self.state.outbox.emit(SendBlob(session.peer, message.request, message.kind, message.name, message.offset))
        else:
            self.state.outbox.send(session.peer, Lacks(message.request))

    def _parts_done(self, event: PartsDone, now: float) -> None:
        self.membership.renewals.fetched(event.size_bytes)
        self.catchup.parts_done(event, now)

    def _want_block(self, session: Session, message: WantBlock, now: float) -> None:
        if self.state.held is None or self._relay_only or not self.state.exchange.gives:
            self.state.outbox.send(session.peer, Lacks(message.request))
        else:
            self.state.outbox.emit(SendBlock(session.peer, message.request, message.block))

    # ------------------------------------------------------------ time

    def _tick(self, event: Timer, now: float) -> None:
        state = self.state
        if event.name == "load-shedding":
            self.repair.timer(now)
            return
        state.sessions.close_unproven(now)
        state.exchange.tick(now)
        self.membership.renewals.note_progress(self.caught_up)
        for peer in self.membership.tick(now, self.repair.pulled_from()):
            self.repair.unanswered(peer)
        if state.grant is not None:
            self._measure(now)
            self.repair.tick(now)
            self.progress.fill_gaps(now, block_sources(state))
            self._skip_missing_versions(now)
            self.catchup.tick(now)
        self._set_tick(now + (1 if self._is_busy else REST_TICKS) * state.tuning.tick_s)

    def _set_tick(self, at: float) -> None:
        self._rests, self._tick_at = not self._is_busy, at
        self.state.outbox.emit(SetTimer("tick", at))

    @property
    def _is_busy(self) -> bool:
        """Whether something is under way that has deadlines shorter than a rest."""
        state = self.state
        return (
            state.grant is None
            or self.catchup.active
            or self.membership.is_cut_off
            or self.membership.renewals.has_to_forward
            or state.exchange.has_backlog
            or any(id_ > state.floor for id_ in state.chunks.versions)
        )

    def _measure(self, now: float) -> None:
        if self.links.take_answered():
            self.membership.report(now, links=self.links.take_measurements())
        self.links.try_newcomers(now)

    def _skip_missing_versions(self, now: float) -> None:
        """Where no chain of versions leads on from ours, catch up with the newest seal. A relay, which has no replica,
        takes that seal as held."""
        behind = self.progress.behind(now)
        if behind is None or self.catchup.active or self.progress.stopped:
            return
        version = self.state.chunks.version(VersionId(behind.epoch, behind.version))
        assert version is not None
        if self._relay_only:
            self.state.set_held(version.id, behind, version.sealed_manifest)
        else:
            self.catchup.start(behind, version.sealed_manifest, now)

    @property
    def caught_up(self) -> float:
        """The share of a version that we hold, from 0 (nothing yet) to 1, as our reports say it."""
        return self.catchup.fraction if self.catchup.active or self.state.held is not None else 0.0

    def standing(self, now: float) -> Standing:
        """Where our own lease stands by the newest heartbeat."""
        grant = self.state.grant
        return Standing.DEAD if grant is None else self.state.leases.standing(grant.slot, now)
