"""A member among members: joining, saying hello, hanging on the right parents, renewing the lease.

Everything here follows from three signed documents: our grant, the newest roster, the newest heartbeat. A parent that
dies or falls silent is replaced at once by a backup that the roster implies; the authority hears of it in our next
report and plans anew at leisure.
"""

from dataclasses import dataclass

from codec.errors import PeerError
from swarm.protocol.events import Close, VersionId
from swarm.protocol.lease import Report, Standing, open_grant, open_report, seal
from swarm.protocol.plan import AUTHORITY, Roster, open_roster
from swarm.protocol.session import Session
from swarm.protocol.state import State
from swarm.protocol.wire import (
    Bye,
    HeartbeatNews,
    Hello,
    Join,
    ManifestNews,
    Reports,
    RosterNews,
    Welcome,
)

__all__ = ["Account", "Membership"]


@dataclass(slots=True)
class Account:
    """What the face tells us to say of ourselves in reports."""

    engine: str = ""
    engine_version: VersionId = VersionId(0, 0)  # noqa: RUF009 - a tuple cannot be changed
    sent_bytes: int = 0
    received_bytes: int = 0
    tokens_s: float = 0.0


def greet(state: State, peer: bytes) -> None:
    """Say hello: who we are and how much we have heard."""
    heartbeat, roster = state.leases.heartbeat, state.roster
    held = state.held or VersionId(0, 0)
    state.send(
        peer,
        Hello(
            state.sealed_grant,
            roster.serial if roster is not None else 0,
            heartbeat.serial if heartbeat is not None else 0,
            held.epoch,
            held.version,
        ),
    )


def share_news(state: State, peer: bytes, hello: Hello) -> None:
    """Send whoever greeted us what is newer here than there."""
    if state.roster is not None and state.roster.serial > hello.roster:
        state.send(peer, RosterNews(state.sealed_roster))
    if state.leases.heartbeat is not None and state.leases.heartbeat.serial > hello.heartbeat:
        state.send(peer, HeartbeatNews(state.leases.sealed))
    if state.held is not None and state.held > (hello.epoch, hello.version):
        state.send(peer, ManifestNews(state.sealed_manifest))


class Membership:
    """Our place in the swarm."""

    def __init__(self, state: State, join: Join, authority: tuple[str, ...]) -> None:
        self._state = state
        self._join = join
        self._authority = authority
        self.account = Account()
        self.catching_up = 1.0
        self._backup: dict[int, bytes] = {}
        """Whom we hang on in place of the planned parent, by stripe."""
        self._lost: dict[int, float] = {}
        """Slots of parents that we lost, and when."""
        self._counter = 0
        self._climbing: dict[int, dict[int, tuple[int, bytes]]] = {}
        """Reports to pass on, by stripe and slot: (counter, sealed)."""
        self._climbed: dict[tuple[int, int], int] = {}
        self._climb_at = 0.0
        self._next_appeal = 0.0
        """Not before then do we turn to the authority again by ourselves."""
        self.leaving = False

    # ------------------------------------------------------------ sessions

    def up(self, session: Session, now: float) -> None:
        """A session is open: ask to join, or say hello."""
        if self._state.grant is not None:
            greet(self._state, session.peer)
        elif session.peer == self._state.swarm:
            self._ask_to_join(now)

    def _ask_to_join(self, now: float) -> None:
        self._next_appeal = now + self._state.tuning.hello_deadline_s
        self._state.send(self._state.swarm, self._join)

    def hello(self, session: Session, message: Hello, now: float) -> None:
        """`PeerError` when its grant is not one."""
        state = self._state
        if session.peer != state.swarm:
            grant = open_grant(message.grant, state.swarm)
            if grant.peer != session.peer:
                raise PeerError("grant: of another peer")
            heartbeat = state.leases.heartbeat
            newer = heartbeat is None or grant.issued >= heartbeat.time
            if state.leases.standing(grant.slot, now) is Standing.DEAD and not newer:
                raise PeerError("grant: expired")
            session.slot = grant.slot
        session.ready = True
        share_news(state, session.peer, message)
        self.rewire(now)

    def welcome(self, session: Session, message: Welcome, now: float) -> None:
        """We are in."""
        state = self._state
        if session.peer != state.swarm:
            raise PeerError("welcome: not from the authority")
        grant = open_grant(message.grant, state.swarm)
        if grant.peer != state.key.public:
            raise PeerError("welcome: a grant for somebody else")
        state.grant, state.sealed_grant = grant, message.grant
        self._counter = 0
        session.ready = True
        self.heartbeat(message.heartbeat, now)
        self.roster(message.roster, now)
        state.notify("joined", slot=grant.slot, serial=grant.serial)

    def refused(self, code: str, why: str, now: float) -> None:
        """The authority says no: tell the face, and do not ask again at once. A grant that it does not know is void."""
        if code == "unknown":
            self._state.grant, self._state.sealed_grant = None, b""
            self._next_appeal = now
        else:
            self._next_appeal = now + 16 * self._state.tuning.dial_retry_s
        self._state.notify("refused", code=code, why=why)

    def lost(self, peer: bytes, session: Session | None, now: float) -> None:
        """A session ended: its stripes need another parent."""
        state = self._state
        stripes = state.exchange.lost_parent(peer)
        state.exchange.detached(peer, None, state.effects)
        if session is not None and session.slot is not None and stripes:
            self._lost[session.slot] = now
        for stripe in [s for s, backup in self._backup.items() if backup == peer]:
            del self._backup[stripe]
        if not self.leaving:
            self.rewire(now)

    # ------------------------------------------------------------ documents

    def heartbeat(self, sealed: bytes, now: float) -> bool:
        """Take a heartbeat in, pass it on, answer it with a report. True when it was news."""
        state = self._state
        if not state.leases.hear(sealed, state.swarm, now):
            return False
        for child in state.children():
            state.send(child, HeartbeatNews(sealed))
        heartbeat = state.leases.heartbeat
        if heartbeat is not None and state.grant is not None:
            self.report(now, turn=heartbeat.serial)
            self._drop_the_dead(now)
        return True

    def roster(self, sealed: bytes, now: float) -> None:
        """Take a roster in, pass it on, move to the parents that it gives us."""
        state = self._state
        if sealed == state.sealed_roster:
            return
        roster = open_roster(sealed, state.swarm)
        if state.roster is not None and (roster.boot, roster.serial) <= (state.roster.boot, state.roster.serial):
            return
        state.roster, state.sealed_roster = roster, sealed
        for child in state.children():
            state.send(child, RosterNews(sealed))
        self._backup.clear()
        self.rewire(now)

    def _drop_the_dead(self, now: float) -> None:
        """Past hard expiry a peer gets no content."""
        state = self._state
        for session in state.sessions:
            if session.slot is None or not session.ready:
                continue
            heartbeat = state.leases.heartbeat
            grown = heartbeat is not None and heartbeat.time > self._issued(session.slot)
            if grown and state.leases.standing(session.slot, now) is Standing.DEAD:
                state.emit(Close(session.peer, "its lease has expired"))

    def _issued(self, slot: int) -> float:
        """A grant younger than the heartbeat has no bit in it yet: one heartbeat of grace for slots we never saw."""
        heartbeat = self._state.leases.heartbeat
        known = self._state.roster is not None and self._state.roster.member(slot) is not None
        return 0.0 if known or heartbeat is None else heartbeat.time - self._state.tuning.heartbeat_s

    # ------------------------------------------------------------ the trees

    def rewire(self, now: float) -> None:
        """Hang on the right parent in each stripe: the planned one, or while it cannot be had the best backup."""
        state = self._state
        roster, grant = state.roster, state.grant
        if roster is None or grant is None or roster.index_of(grant.slot) is None:
            return
        for stripe in range(roster.stripes):
            self._rewire_stripe(roster, stripe, grant.slot, now)
        self._reach_out(roster, grant.slot, now)

    def _rewire_stripe(self, roster: Roster, stripe: int, slot: int, now: float) -> None:
        state = self._state
        planned = roster.parent(stripe, slot)
        if planned is None:
            return
        parent = state.peer_of(planned)
        if planned == AUTHORITY or self._usable(planned, now):
            self._backup.pop(stripe, None)
        else:
            parent = self._backup.get(stripe)
            if parent is None:
                parent = self._backup[stripe] = self._choose_backup(roster, stripe, slot, now)
        if parent is None:
            return
        edge = state.exchange.parents.get(stripe)
        if self._reach(roster, parent, now) and state.sessions.ready(parent) and (edge is None or edge.peer != parent):
            state.exchange.attach_to(stripe, parent, state.floor, now, state.effects)

    def _usable(self, slot: int, now: float) -> bool:
        peer = self._state.peer_of(slot)
        if peer is None or slot in self._lost or self._state.sessions.failing(peer):
            return False
        return self._state.leases.standing(slot, now) is not Standing.DEAD

    def _choose_backup(self, roster: Roster, stripe: int, slot: int, now: float) -> bytes:
        """The first backup that can be had; one that we are connected to already goes first. At last the authority."""
        candidates = [self._state.peer_of(s) for s in roster.backups(stripe, slot) if self._usable(s, now)]
        peers = [p for p in candidates if p is not None]
        ready = [p for p in peers if self._state.sessions.ready(p)]
        return next(iter(ready or peers), self._state.swarm)

    def _reach(self, roster: Roster, peer: bytes, now: float) -> bool:
        """A session with `peer`, dialing it when the edge is ours to dial."""
        state = self._state
        if peer == state.swarm:
            return state.sessions.reach(peer, roster.authority or self._authority, now, state.effects)
        member = next((m for m in roster.members if m.peer == peer), None)
        if member is None:
            return state.sessions.get(peer) is not None
        addrs = member.addrs if member.dialable else ()
        return state.sessions.reach(peer, addrs, now, state.effects)

    def _reach_out(self, roster: Roster, slot: int, now: float) -> None:
        """Dial children that cannot be reached from where they are told to dial: an edge needs one dialable end."""
        me = roster.member(slot)
        if me is None or me.dialable:
            return
        for stripe in range(roster.stripes):
            for child in roster.children(stripe, slot):
                peer = self._state.peer_of(child)
                if peer is not None:
                    self._reach(roster, peer, now)

    # ------------------------------------------------------------ reports

    def report(self, now: float, turn: int | None = None, *, leaving: bool = False) -> bytes:
        """Sign a report over the last heartbeat and start it up two trees (which ones: `turn`)."""
        state = self._state
        grant, heartbeat = state.grant, state.leases.heartbeat
        if grant is None or heartbeat is None:
            return b""
        self._counter += 1
        held = state.held or VersionId(0, 0)
        account = self.account
        recent = tuple(sorted(s for s, at in self._lost.items() if now - at < state.tuning.soft_ttl_s))
        sealed = seal(
            Report(
                state.swarm, state.key.public, grant.slot, grant.serial, self._counter,
                state.leases.hash, held.epoch, held.version, account.engine_version.epoch,
                account.engine_version.version, account.engine, account.sent_bytes, account.received_bytes,
                account.tokens_s, leaving, self.catching_up, recent[:16],
            ),
            state.key,
        )  # fmt: skip
        stripes = state.roster.stripes if state.roster is not None else 1
        turn = heartbeat.serial if turn is None else turn
        for stripe in {turn % stripes, (turn + 1) % stripes}:
            self._climb(stripe, grant.slot, self._counter, sealed, now)
        return sealed

    def climb(self, message: Reports, now: float) -> None:
        """Children's reports: on to our own parent of that stripe. Whoever signed them, the authority will check."""
        for sealed in message.reports:
            report = open_report(sealed, self._state.swarm)
            self._climb(message.stripe, report.slot, report.counter, sealed, now)

    def _climb(self, stripe: int, slot: int, counter: int, sealed: bytes, now: float) -> None:
        if self._climbed.get((stripe, slot), -1) >= counter:
            return
        if not self._climbing:
            self._climb_at = now + self._state.tuning.report_batch_s
        self._climbed[stripe, slot] = counter
        self._climbing.setdefault(stripe, {})[slot] = (counter, sealed)

    def _send_reports(self) -> None:
        state = self._state
        for stripe, reports in sorted(self._climbing.items()):
            edge = state.exchange.parents.get(stripe)
            parent = edge.peer if edge is not None else state.swarm
            if state.sessions.ready(parent):
                state.send(parent, Reports(stripe, tuple(sealed for _, sealed in reports.values())))
        self._climbing.clear()

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        state = self._state
        if self.leaving:
            return
        if state.grant is None and now >= self._next_appeal:
            if state.sessions.reach(state.swarm, self._authority, now, state.effects):
                self._ask_to_join(now)
            return
        for slot in [s for s, at in self._lost.items() if now - at > state.tuning.soft_ttl_s]:
            del self._lost[slot]
        self._find_silent(now)
        self.rewire(now)
        if self._climbing and now >= self._climb_at:
            self._send_reports()
        self._mind_own_lease(now)

    def _find_silent(self, now: float) -> None:
        """A parent that says nothing for three heartbeats while others do has stopped: the library will not tell."""
        state = self._state
        limit = 3 * state.tuning.heartbeat_s
        if now - state.leases.heard_at > limit:
            return  # the authority itself is silent: nobody has anything to say
        for peer in sorted({edge.peer for edge in state.exchange.parents.values()}):
            session = state.sessions.get(peer)
            if session is not None and now - session.heard_at > limit:
                if session.slot is not None:
                    self._lost[session.slot] = now
                state.emit(Close(peer, "silent for three heartbeats"))

    def _mind_own_lease(self, now: float) -> None:
        """Not fresh in the newest heartbeat: the reports do not arrive, so talk to the authority directly."""
        state = self._state
        grant = state.grant
        if grant is None or state.leases.heartbeat is None:
            return
        late = now - state.leases.heard_at > 2 * state.tuning.heartbeat_s
        if late or state.leases.standing(grant.slot, now) is not Standing.FRESH:
            state.sessions.reach(state.swarm, self._authority, now, state.effects)
            if not late and state.sessions.ready(state.swarm) and now >= self._next_appeal:
                self._next_appeal = now + state.tuning.heartbeat_s
                sealed = self.report(now)
                state.send(state.swarm, Reports(0, (sealed,)))

    def leave(self, now: float) -> None:
        """Release the lease: tell the authority and everybody we are connected to."""
        self.leaving = True
        sealed = self.report(now, leaving=True)
        for session in self._state.sessions:
            if session.ready and sealed:
                self._state.send(session.peer, Bye(sealed))
