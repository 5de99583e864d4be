"""Admission: the authority admits, welcomes, expels and charges members."""

from collections.abc import Callable, Sequence

from codec.errors import PeerError, UsageError
from codec.formats.share import Share, share_of
from swarm.protocol.core.documents import AuthorityTime, Grant, Report, open_capability, open_grant
from swarm.protocol.core.events import Persist, Persisted
from swarm.protocol.core.notices import MemberJoined, MemberLeft
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Hello, Join, Neighbour, Refused, Succession, Welcome
from swarm.protocol.membership.enrolment import Enrolment, Enrolments, open_record, record_of
from swarm.protocol.membership.greeting import share_news
from swarm.protocol.membership.heartbeats import Heartbeats
from swarm.protocol.membership.lease import Lease, LeaseBook
from swarm.protocol.membership.quota import Fetched
from swarm.protocol.membership.roster import AUTHORITY
from swarm.protocol.membership.session import BAN_S, Session
from swarm.protocol.membership.tickets import BARRED, LATER, REVOKED
from swarm.protocol.state import State
from swarm.protocol.topology.replanning import Replanner

__all__ = ["Admission"]

ROSTER_IN_WELCOME = 64 << 10
"""Bytes: a welcome includes the roster of up to about 400 members. A larger one would cost the trainer up to a megabyte
for each newcomer, which gets it from neighbours instead."""
SHARD = "shard"
"""Code of the refusal of a joiner that asks for a shard or a format which this swarm does not have."""
NEIGHBOURS = 8
"""Neighbours named in a welcome without roster."""


class Admission:
    """Admits peers to the swarm and ends their leases, at the authority."""

    def __init__(
        self,
        state: State,
        book: LeaseBook,
        enrolled: Enrolments,
        replanner: Replanner,
        time: Callable[[float], AuthorityTime],
        heartbeats: Heartbeats,
        *,
        shards: int = 0,
        formats: tuple[str, ...] = (),
    ) -> None:
        """`shards`: over how many ranks the model's experts are dealt; 0: over none. `formats`: those that the swarm
        has."""
        self._shards = shards
        self._formats = formats
        self._state = state
        self._book = book
        self._enrolled = enrolled
        self._replanner = replanner
        self._time = time
        self._heartbeats = heartbeats
        self._awaiting: dict[str, bytes] = {}
        """Grants that are being made durable: token -> peer."""
        self._welcoming: list[bytes] = []
        """Peers whose grant is durable: they are welcomed with the next plan."""
        self._fetched = Fetched()

    def restore(self, grants: Sequence[bytes], tickets: Sequence[bytes], bars: Sequence[bytes], now: float) -> None:
        """Restore the leases of earlier boots, each as if renewed now."""
        self._book.tickets.restore(tickets, bars)
        opened = [open_record(record) for record in grants]
        self._book.restore([sealed for sealed, _ in opened], self._time(now))
        for sealed, enrolment in opened:
            grant = open_grant(sealed, self._state.swarm)
            if self._current(grant):
                self._enrolled[grant.peer] = enrolment
                self._fetched.resume(grant.peer)

    def _current(self, grant: Grant) -> bool:
        lease = self._book.leases.get(grant.slot)
        return lease is not None and lease.grant == grant

    # ------------------------------------------------------------ joining

    def join(self, session: Session, message: Join, now: float) -> None:
        """Admit a peer, make the grant durable, and only then welcome it.

        A repeated request within a heartbeat is ignored. A peer that asks again although its lease is valid, because
        the welcome was lost, is welcomed again.
        """
        peer = session.peer
        if now - session.asked_at < self._state.tuning.heartbeat_s or peer in self._awaiting.values():
            return
        session.asked_at = now
        if session.ready and self._book.slot_of.get(peer) == session.slot and self._shard(message) == session.shard:
            self._welcome(session)
            return
        lease = self._admit(message, peer, now)
        if isinstance(lease, Refused):
            self._state.outbox.send(peer, lease)
            return
        enrolment = self._enrolled[peer] = Enrolment(message, session.address)
        token = f"grant/{lease.grant.slot}/{lease.grant.serial}"
        self._awaiting[token] = peer
        self._enrolled.probe(peer, now)
        # In this order, so that the peer of every grant on disk is bound to its ticket there too.
        self._persist_ticket(lease.grant.capability)
        self._state.outbox.emit(Persist(token, f"grant/{lease.grant.slot}", record_of(lease.sealed, enrolment)))

    def _admit(self, message: Join, peer: bytes, now: float) -> Lease | Refused:
        try:
            capability = open_capability(message.capability, self._state.swarm)
        except PeerError:
            return Refused("capability", "This ticket is not one of this swarm: ask its trainer for one.")
        if self._state.succession:  # members follow to the new key; others cannot
            self._state.outbox.send(peer, Succession(self._state.succession))
            return Refused(LATER, "This swarm has a new key: ask for a new ticket (swarm-node invite).")
        shard = self._shard(message)
        if isinstance(shard, Refused):
            return shard
        lease = self._book.admit(capability, peer, self._time(now), shard)
        return lease if isinstance(lease, Lease) else Refused(lease.code, lease.why)

    def _shard(self, message: Join) -> Share | Refused | None:
        """What of the model a joiner asks to hold, None: all of it; or why it cannot."""
        if message.form and message.form not in self._formats:
            has = f"has {' and '.join(self._formats)}" if self._formats else "has no formats"
            return Refused(
                SHARD, f"This swarm {has}, not {message.form!r}. Ask its trainer for it (seed --format); without "
                "--format this machine holds the whole model."
            )  # fmt: skip
        if not message.form and (message.shards or message.ranks) and message.shards != self._shards:
            dealt = f"deals experts over {self._shards} ranks" if self._shards else "does not deal experts over ranks"
            return Refused(
                SHARD, f"This swarm {dealt}, not over {message.shards}. Ask its trainer; without --shard this machine "
                "holds the whole model."
            )  # fmt: skip
        try:
            return share_of(message.shards, message.ranks, message.form)
        except UsageError as error:
            return Refused(SHARD, str(error))

    def _persist_ticket(self, id_: bytes) -> None:
        self._state.outbox.emit(Persist(f"ticket/{id_.hex()}", f"ticket/{id_.hex()}", self._book.tickets.record(id_)))

    def persisted(self, event: Persisted) -> bool:
        """A record is durable; True if it is a grant, whose peer is welcomed with the next plan."""
        peer = self._awaiting.pop(event.token, None)
        if peer is not None:
            self._welcoming.append(peer)
            self._replanner.mark_stale()
        return peer is not None

    def welcome_all(self, now: float) -> None:
        """Welcome the peers that are in the plan for the first time. Call it after each plan."""
        welcoming, self._welcoming = self._welcoming, []
        if welcoming:
            self._heartbeats.send(now)
        for peer in welcoming:
            slot, session = self._book.slot_of.get(peer), self._state.sessions.get(peer)
            if slot is not None and session is not None:
                session.ready, session.slot = True, slot
                session.shard = self._book.leases[slot].grant.shard
                self._welcome(session)
                self._state.outbox.notify(MemberJoined(peer, slot, self._enrolled[peer].join.name))

    def _welcome(self, session: Session) -> None:
        assert session.slot is not None
        state, sealed = self._state, self._book.leases[session.slot].sealed
        whole, neighbours = state.rosters.whole(), ()
        if len(whole) > ROSTER_IN_WELCOME:
            whole, neighbours = b"", self._neighbours(session.slot)
        state.outbox.send(session.peer, Welcome(sealed, whole, state.leases.sealed, state.sealed_manifest, neighbours))

    def _neighbours(self, slot: int) -> tuple[Neighbour, ...]:
        """The planned parents of a newcomer, which can give it the roster."""
        roster = self._state.roster
        if roster is None:
            return ()
        near: dict[int, None] = {}
        for stripe in range(roster.stripes):
            parent = roster.parent(stripe, slot)
            if parent is not None and parent != AUTHORITY:
                near[parent] = None
        members = [roster.member(s) for s in near]
        return tuple(Neighbour(m.peer, m.addrs) for m in members if m is not None and m.addrs)[:NEIGHBOURS]

    def hello(self, session: Session, message: Hello, now: float) -> None:
        """A member returns with a grant of this or an earlier boot."""
        state = self._state
        grant = open_grant(message.grant, state.swarm) if message.grant else None
        if grant is not None and grant.peer != session.peer:
            raise PeerError("grant: belongs to another peer")
        if grant is None or not self._current(grant):
            state.outbox.send(session.peer, Refused("unknown", "Your lease is over: join again with your ticket."))
            return
        session.ready, session.slot, session.shard = True, grant.slot, grant.shard
        session.asked_at = now  # a join request that came with this hello, in case the lease was over, has no use
        enrolment = self._enrolled[session.peer]
        if session.address not in (None, enrolment.seen_at):
            enrolment.seen_at = session.address
            self._enrolled.probe(session.peer, now)
        head = state.held or VersionId(0, 0)
        beat = state.leases.heartbeat.stamp if state.leases.heartbeat is not None else 0
        state.outbox.send(session.peer, Hello(b"", state.rosters.stamp, beat, head.epoch, head.version))
        share_news(state, session.peer, message)
        if state.succession:
            state.outbox.send(session.peer, Succession(state.succession))

    # ------------------------------------------------------------ leaving

    def forget_holder(self, slot: int, peer: bytes) -> None:
        """A lease has ended: forget its holder, in memory and on disk, except for its use of the ticket."""
        self._replanner.forget(slot)
        self._enrolled.pop(peer, None)
        self._fetched.forget(peer)
        self._state.outbox.emit(Persist(f"release/{slot}", f"grant/{slot}", b""))

    def kick(self, peer: bytes, now: float) -> bool:
        """End the lease of `peer` now, and refuse it for `BAN_S`, durably. False if it has no lease."""
        slot = self._book.slot_of.get(peer)
        if slot is None:
            return False
        tickets, time = self._book.tickets, self._time(now)
        tickets.kick(peer, AuthorityTime(time + BAN_S))
        for other in (*tickets.forgive(time), peer):
            name = f"kick/{other.hex()}"
            self._state.outbox.emit(Persist(name, name, tickets.kick_record(other)))
        self._expel(slot, peer, BARRED, now)
        return True

    def _expel(self, slot: int, peer: bytes, why: str, now: float) -> None:
        self._book.release(slot)
        self.forget_holder(slot, peer)
        self._state.outbox.send(peer, Refused("ticket", why))
        self._state.close(peer, "removed from the swarm")
        self._state.outbox.notify(MemberLeft(peer, slot, why))
        self._heartbeats.send(now)

    def revoke(self, ticket: bytes, now: float, *, undo: bool = False) -> list[bytes]:
        """Revoke a ticket, durably, and end its leases; returns their holders. `undo`: make the ticket valid again."""
        self._book.tickets.revoke(ticket, undo=undo)
        self._persist_ticket(ticket)
        leases = [] if undo else [x for x in self._book.leases.values() if x.grant.capability == ticket]
        for lease in sorted(leases, key=lambda lease: lease.grant.slot):
            self._expel(lease.grant.slot, lease.grant.peer, REVOKED, now)
        return [lease.grant.peer for lease in leases]

    def bar(self, peer: bytes, now: float, *, undo: bool = False) -> bool:
        """Refuse this peer with every ticket, durably, and end its lease. `undo`: admit it again.

        True if that changed anything.
        """
        changed = self._book.tickets.bar(peer, undo=undo)
        name = f"bar/{peer.hex()}"
        self._state.outbox.emit(Persist(name, name, self._book.tickets.bar_record(peer)))
        slot = self._book.slot_of.get(peer)
        if undo:
            name = f"kick/{peer.hex()}"
            self._state.outbox.emit(Persist(name, name, b""))
        elif slot is not None:
            self._expel(slot, peer, BARRED, now)
        return changed

    # ------------------------------------------------------------ quotas

    def charge_reported(self, report: Report, now: float) -> None:
        """Charge the blocks that a report says its author fetched, and gave to others."""
        self._charge(report.peer, self._fetched.own(report.peer, report.fetched_bytes), now)
        giver = self._book.leases.get(report.slot)
        for slot, total in report.gave if giver is not None else ():
            lease = self._book.leases.get(slot)
            if lease is not None and giver is not None:
                same = giver.grant.capability == lease.grant.capability
                side = b"" if same else giver.grant.capability
                self._charge(
                    lease.grant.peer, self._fetched.said(report.peer, lease.grant.peer, total, side), now, hearsay=True
                )

    def charge_served(self, peer: bytes, size: int, now: float) -> None:
        """The authority gave `peer` a block, hash list or file of `size` bytes."""
        if peer in self._book.slot_of:
            self._charge(peer, self._fetched.gave(peer, size), now)

    def _charge(self, peer: bytes, more: int, now: float, *, hearsay: bool = False) -> None:
        """Charge `more` bytes to the ticket of `peer`.

        A peer that fetches beyond the quota is expelled, and the ticket admits no peer any more. `hearsay`: other
        members report the bytes; a peer that is complete by then stays, since it fetches nothing any more.
        """
        slot = self._book.slot_of.get(peer)
        if slot is None or more == 0:
            return
        ticket = self._book.leases[slot].grant.capability
        tickets = self._book.tickets
        if tickets.fetched(ticket, more):
            self._persist_ticket(ticket)
        used = tickets.get(ticket)
        if used is not None and 0 < used.quota_bytes < used.fetched_bytes:
            self._persist_ticket(ticket)
            report = self._book.leases[slot].report
            if not hearsay or report is None or report.catching_up < 1:
                self._expel(slot, peer, used.no_more, now)
