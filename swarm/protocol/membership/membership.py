"""A member's part of membership: it joins, greets neighbours, attaches to its parents and renews its lease.

All decisions follow from three signed documents: our grant, the newest roster and the newest heartbeat. A parent that
dies or falls silent is replaced at once by a failover parent, which follows from the roster. The authority learns of it
from our next report, and plans again later.
"""

from collections.abc import Mapping
from itertools import chain, islice

from msgspec.structs import replace

from codec.errors import PeerError
from swarm.protocol.core.documents import Link, open_grant, open_heartbeat
from swarm.protocol.core.notices import BudgetChanged, ClocksApart, Joined, JoinRefused, PeerStuck
from swarm.protocol.core.reach import can_connect, is_circuit, to_dial
from swarm.protocol.core.wire import Bye, HeartbeatNews, Hello, Join, Neighbour, Reports, WantRoster, Welcome
from swarm.protocol.membership.greeting import greet, pass_on, reach_out, share_news
from swarm.protocol.membership.lease import Standing
from swarm.protocol.membership.lease_end import (
    close_expired_sessions,
    ended_in_silence,
    is_own_lease_over,
    is_session_over,
)
from swarm.protocol.membership.renewals import Renewals
from swarm.protocol.membership.roster import AUTHORITY, Member, Roster, open_change
from swarm.protocol.membership.session import BACK_OFF_TIMES, Session
from swarm.protocol.membership.silence import DOUBT_S, expects_data, has_outlasted_leases, is_late, silent_parents
from swarm.protocol.state import State

__all__ = ["Membership", "reach_out"]

FAILOVER_PARENTS_TRIED = 64
"""Failover parents tried in a large roster: if none of them is usable, it is this member that is cut off."""


class Membership:
    """This member's place in the swarm."""

    def __init__(self, state: State, join: Join, authority: tuple[str, ...]) -> None:
        self._state = state
        self._join = join
        self._authority = authority
        self.renewals = Renewals(state)
        self._failover_parent: dict[int, bytes] = {}
        """By stripe: the failover parent in place of the planned parent."""
        self._admitted_at = 0.0
        self._neighbours: tuple[Neighbour, ...] = ()
        """Members that have the roster, from the welcome, as long as we have none."""
        self._next_appeal = 0.0
        """Local time before which we do not send the authority a join or a report on our own."""
        self._rest_until = 0.0
        """Local time until which we stay away after the authority has closed our session as surplus."""
        self._turn_at: float | None = None
        """Local time at which to contact the authority if we hear nothing from it, or it hears nothing from us."""
        self._distrusts = False
        """A heartbeat was ignored because its boot is too far in the future."""
        self._spent = False
        """The daily upload limit is used up."""
        self.leaving = False

    # ------------------------------------------------------------ sessions

    def listening(self, addrs: tuple[str, ...]) -> None:
        """Add this machine's listening addresses to the join request, unless direct addresses were configured."""
        if all(is_circuit(address) for address in self._join.addrs):
            self._join = replace(self._join, addrs=(addrs + self._join.addrs)[:16])

    def up(self, session: Session, now: float) -> None:
        """A session is open: send a hello or a join request; to the authority both if our lease may be over."""
        state = self._state
        if state.grant is not None:
            greet(state, session.peer)
        if session.peer == state.swarm and (state.grant is None or has_outlasted_leases(state, now)):
            self._ask_to_join(now)

    def _ask_to_join(self, now: float) -> None:
        self._next_appeal = now + self._state.tuning.hello_deadline_s
        self._state.outbox.send(self._state.swarm, self._join)

    def hello(self, session: Session, message: Hello, now: float) -> None:
        """A neighbour greets us. Raises `PeerError` for a forged grant; an expired one only closes the session."""
        state = self._state
        if session.peer != state.swarm:
            grant = open_grant(message.grant, state.swarm)
            if grant.peer != session.peer:
                raise PeerError("grant: belongs to another peer")
            session.slot, session.issued, session.shard = grant.slot, grant.issued, grant.shard
            if is_session_over(state, session, now):
                state.close(session.peer, "its lease is over")
                return
            state.lost_peers.note_present(grant.slot)
        session.ready = True
        if state.grant is None and session.peer != state.swarm:
            return  # until our own hello it bans us for anything that we send; `welcome` greets it
        state.sessions.ping(session, now)
        session.roster = max(session.roster, message.roster)
        if (
            heartbeat := state.leases.heartbeat
        ) is not None:  # a hello only claims: trust it no further than the signed heartbeat
            state.rosters.hear_of(min(message.roster, heartbeat.boot << 32 | heartbeat.roster), now)
        share_news(state, session.peer, message)
        self.rewire(now)

    def welcome(self, session: Session, message: Welcome, now: float) -> None:
        """The authority admitted us."""
        state = self._state
        if session.peer != state.swarm:
            raise PeerError("welcome: not from the authority")
        grant = open_grant(message.grant, state.swarm)
        if grant.peer != state.key.public:
            raise PeerError("welcome: the grant is for another peer")
        join = self._join
        if (grant.shards, grant.ranks, grant.form) != (join.shards, join.ranks, join.form):
            raise PeerError("welcome: the grant is for another shard of the model")
        state.own_lease.grant, state.own_lease.sealed = grant, message.grant
        self.renewals.begin()
        session.ready = True
        state.sessions.ping(session, now)
        self._admitted_at = now
        self._neighbours = message.neighbours
        for other in state.sessions:  # those that connected before we had a grant
            if other.peer != state.swarm:
                greet(state, other.peer)
                if other.ready:
                    state.sessions.ping(other, now)
        self.heartbeat(message.heartbeat, now)
        if message.roster:
            self.roster(message.roster, now)
        self._review_giving(now)
        state.outbox.notify(Joined(grant.slot, grant.serial))

    def refused(self, code: str, why: str, now: float) -> None:
        """The authority refused us: tell the application, and wait before asking again.

        If it does not know our grant, the grant is void, and we may join again at once.
        """
        if code == "unknown":
            self._void_grant(now, now)
            if self._state.sessions.get(self._state.swarm) is not None:
                self._ask_to_join(now)
        else:
            self._next_appeal = now + BACK_OFF_TIMES * self._state.tuning.dial_retry_s
        self._state.outbox.notify(JoinRefused(code, why))

    def _void_grant(self, join_at: float, now: float) -> None:
        """Our lease is over: join again, not before the local time `join_at`."""
        own = self._state.own_lease
        own.grant, own.sealed = None, b""
        self._next_appeal = join_at
        self._review_giving(now)

    def lost(self, peer: bytes, session: Session | None, now: float) -> None:
        """A session ended: find other parents for its stripes."""
        state = self._state
        if peer == state.swarm and session is not None and session.ready and state.grant is None:
            self._next_appeal = now  # it was closed when it had refused our report, so it did not hear our request
        stripes = state.exchange.parents.lost(peer)
        state.exchange.detached(peer, None)
        if session is not None and session.slot is not None and stripes:
            state.lost_peers.note_lost(session.slot, now)
        for stripe in [s for s, parent in self._failover_parent.items() if parent == peer]:
            del self._failover_parent[stripe]
        if not self.leaving:
            self.rewire(now)

    # ------------------------------------------------------------ documents

    def heartbeat(self, sealed: bytes, now: float) -> bool:
        """Take a heartbeat; if it is new, forward it and answer with a report. True if it is new."""
        state, before = self._state, self._state.leases.heartbeat
        late = before is not None and is_late(state, now)
        if not state.leases.hear(sealed, state.swarm, now, state.latest_boot(now)):
            self._note_ignored_boot(sealed, now)
            return False
        for child in state.children():
            state.outbox.send(child, HeartbeatNews(sealed))
        if late:
            self._retry_dials(now)
        heartbeat = state.leases.heartbeat
        if heartbeat is not None:
            state.rosters.hear_of(heartbeat.boot << 32 | heartbeat.roster, now)
        restarted = before is not None and heartbeat is not None and heartbeat.boot > before.boot
        if restarted and state.sessions.ready(state.swarm):
            # Our session may be with the process that was replaced: this tells it so.
            state.outbox.send(state.swarm, HeartbeatNews(sealed))
        if ended_in_silence(state.grant, before, heartbeat, state.tuning):
            wait_s = 0.0 if state.sessions.tries(state.swarm) else state.rng.uniform(0.0, self._return_s)
            self._void_grant(now + wait_s, now)
        if heartbeat is not None and state.grant is not None:
            self.report(now, turn=heartbeat.serial)
            close_expired_sessions(state, now)
            self._review_giving(now)
        return True

    def _retry_dials(self, now: float) -> None:
        """The first heartbeat after a silence: the network is back, so nobody waits until a back-off is over. The
        authority is dialed by turns all the same, since all who were cut off hear of it at once."""
        state = self._state
        self._turn_at = None
        state.sessions.retry(now, {state.swarm: self._return_s})

    @property
    def _return_s(self) -> float:
        """The time in which all members may dial the authority once each."""
        roster = self._state.roster
        return 0.0 if roster is None else len(roster.members) / self._state.tuning.returns_s

    def _note_ignored_boot(self, sealed: bytes, now: float) -> None:
        """Tell the application, once, that a heartbeat was ignored because our clock and the authority's differ."""
        if (
            not self._distrusts
            and sealed
            and open_heartbeat(sealed, self._state.swarm).boot > self._state.latest_boot(now)
        ):
            self._distrusts = True
            self._state.outbox.notify(ClocksApart())

    def roster(self, data: bytes, now: float) -> None:
        """Take a whole roster."""
        before = self._state.roster
        if self._state.rosters.take_whole(data, self._state.latest_boot(now)):
            self._new_roster(before, now)

    def roster_step(self, session: Session, change: bytes, now: float) -> None:
        """Take a change of the roster; if we lack the roster that it changes, request it."""
        before = self._state.roster
        session.roster = max(session.roster, open_change(change, self._state.swarm).stamp)
        if self._state.rosters.take_step(change, now, self._state.latest_boot(now)):
            self._new_roster(before, now)
        else:
            self._request_roster(now)

    def _new_roster(self, before: Roster | None, now: float) -> None:
        """Forward the change, and attach to the parents of the new roster."""
        state, roster = self._state, self._state.roster
        assert roster is not None
        self._neighbours = ()
        state.lost_peers.new_roster(before, roster)
        self.renewals.new_roster(roster)
        state.sessions.keep({state.swarm, *(m.peer for m in roster.members)})
        state.sessions.limit_back_off(state.swarm, self._return_s)
        pass_on(state, roster)
        self._failover_parent.clear()
        self.rewire(now)

    def _request_roster(self, now: float) -> None:
        """Request the roster that we lack. Without any roster, dial the neighbours that the welcome named."""
        state = self._state
        for neighbour in self._neighbours[:3] if state.roster is None else ():
            state.sessions.reach(neighbour.peer, neighbour.addrs, now)
        root_child = any(edge.peer == state.swarm for edge in state.exchange.parents.edges.values())
        peer = state.rosters.whom_to_ask(
            state.sessions, state.swarm, now, admitted_at=self._admitted_at, root_child=root_child
        )
        if peer is not None and (session := state.sessions.get(peer)) is not None:
            session.wanted_roster_at = now
            state.outbox.send(peer, WantRoster(state.rosters.stamp))

    # ------------------------------------------------------------ the trees

    def rewire(self, now: float) -> None:
        """Attach to the right parent in each stripe: the planned one, or a failover parent while that is not usable."""
        state = self._state
        roster, grant = state.roster, state.grant
        if self.leaving or roster is None or grant is None or roster.index_of(grant.slot) is None:
            return
        for stripe in range(roster.stripes):
            self._rewire_stripe(roster, stripe, grant.slot, now)
        if (me := roster.member(grant.slot)) is not None:
            reach_out(state, grant.slot, me, now)

    def _rewire_stripe(self, roster: Roster, stripe: int, slot: int, now: float) -> None:
        state = self._state
        planned = roster.parent(stripe, slot)
        if planned is None:
            return
        parent = state.peer_of(planned)
        if planned == AUTHORITY or self._usable(roster, planned, now):
            self._failover_parent.pop(stripe, None)
        else:
            parent = self._failover_parent.get(stripe)
            if parent is None:
                parent = self._failover_parent[stripe] = self._choose_failover_parent(roster, stripe, slot, now)
        if parent is None:
            return
        edge = state.exchange.parents.edges.get(stripe)
        attached = edge is not None and edge.peer == parent
        if attached and state.sessions.get(parent) is not None:
            return  # the usual case, several times a second: there is nobody to dial
        if self._reach(roster, parent, now) and state.sessions.ready(parent) and not attached and state.may_attach:
            failover = planned != AUTHORITY and parent != state.peer_of(planned)
            state.exchange.parents.attach_to(stripe, parent, state.floor, now, failover=failover)

    def _usable(self, roster: Roster, slot: int, now: float) -> bool:
        """Whether the holder of `slot` is alive and not lost, and there is a session with it, or can be one."""
        state = self._state
        member, me = roster.member(slot), roster.member_of(state.key.public)
        if member is None or state.lost_peers.is_lost(slot) or state.sessions.failing(member.peer, now):
            return False
        # A failover parent does not know that we want to attach, so it will not dial us.
        if state.sessions.get(member.peer) is None and (me is None or not self._can_get_session(roster, slot, me)):
            return False
        return state.leases.standing(slot, now).rights.content

    @staticmethod
    def _can_get_session(roster: Roster, slot: int, me: Member) -> bool:
        """Whether we can dial the holder of `slot`, or it will dial us because the roster lists us as its child."""
        member = roster.member(slot)
        if member is None:
            return False
        planned = any(roster.parent(k, me.slot) == slot for k in range(roster.stripes))
        return bool(to_dial(me, member)) or (planned and can_connect(me, member))

    def _choose_failover_parent(self, roster: Roster, stripe: int, slot: int, now: float) -> bytes:
        """The best usable failover parent, with connected members first; the authority if there is none."""
        near = [s.slot for s in self._state.sessions if s.ready and s.slot is not None]
        anyone = islice(roster.each_failover_parent(stripe, slot), FAILOVER_PARENTS_TRIED)
        for parent in chain(roster.each_failover_parent(stripe, slot, among=near), anyone):
            peer = self._state.peer_of(parent)
            if peer is not None and self._usable(roster, parent, now) and self._has_uplink(roster, parent):
                return peer
        return self._state.swarm

    @staticmethod
    def _has_uplink(roster: Roster, slot: int) -> bool:
        """Whether the holder of `slot` forwards content: its uplink is not 0, and its daily limit not used up."""
        member = roster.member(slot)
        return member is not None and member.up_mbit > 0

    def _reach(self, roster: Roster, peer: bytes, now: float) -> bool:
        """Whether there is a session with `peer`; dial it if it is our turn to dial."""
        state = self._state
        if peer == state.swarm:
            # The ticket may name further machines, of which one has become the authority since that roster.
            addrs = tuple(dict.fromkeys((*roster.authority, *self._authority)))
            return state.sessions.reach(peer, addrs, now)
        member, me = roster.member_of(peer), roster.member_of(state.key.public)
        if member is None or me is None:
            return state.sessions.get(peer) is not None
        return state.sessions.reach(peer, to_dial(me, member), now)

    # ------------------------------------------------------------ reports

    def report(
        self, now: float, turn: int | None = None, *, leaving: bool = False, links: tuple[Link, ...] = ()
    ) -> bytes:
        """Send a report, with the parents that we lost lately; returns it sealed."""
        recent = self._state.lost_peers.recent(now)
        return self.renewals.report(now, turn=turn, leaving=leaving, lost=recent[:16], links=links)

    def budget(self, saving: bool, spent: bool, now: float) -> None:
        """The daily upload limit is nearly used up (`saving`) or used up (`spent`), or not any more.

        Report a change of `saving` at once, so that the next plan accounts for it. While `spent`, send no content.
        """
        self._spent = spent
        if self.renewals.note_saving(saving):
            self.report(now)
            self._state.outbox.notify(BudgetChanged(saving))
        self._review_giving(now)

    def _review_giving(self, now: float) -> None:
        """Send content only with an uplink, a lease, and some of the daily limit left."""
        exchange = self._state.exchange
        gives = self._join.up_mbit > 0 and not self._spent and not is_own_lease_over(self._state, now)
        if gives != exchange.gives:
            exchange.give(gives, now)

    # ------------------------------------------------------------ time

    def tick(self, now: float, asked: Mapping[bytes, float] | None = None) -> list[bytes]:
        """Do what is due; returns the parents and sources that do not answer.

        `asked`: peers besides our parents that were asked for chunks, and the local time of the request.
        """
        state = self._state
        if self.leaving:
            return []
        if state.grant is None and now >= self._next_appeal:
            if state.sessions.reach(state.swarm, self._authority, now):
                self._ask_to_join(now)
            return []
        state.lost_peers.forget_old(now)
        self._request_roster(now)
        self._find_silent(now)
        stuck = self._find_stuck(now, asked or {})
        self.rewire(now)
        if self.renewals.account.engine and now >= self._rest_until:  # work comes from the authority's own session
            state.sessions.reach(state.swarm, self._authority, now)
        self.renewals.tick(now)
        self._watch_own_lease(now)
        return stuck

    def answered(self, session: Session, now: float) -> None:
        """A peer answered a ping: it is not lost."""
        if self._state.lost_peers.note_present(session.slot):
            self.rewire(now)

    def _find_stuck(self, now: float, asked: Mapping[bytes, float]) -> list[bytes]:
        """Find parents and asked peers that send nothing and do not answer a ping; they are replaced until they do.

        This detects frozen processes and cut cables; a closed connection is reported by the transport.
        """
        state, stuck = self._state, list[bytes]()
        if not expects_data(state, now):
            return stuck
        came = dict(asked)
        for stripe, edge in state.exchange.parents.edges.items():
            came[edge.peer] = max(came.get(edge.peer, 0.0), state.exchange.parents.progress_at.get(stripe, 0.0))
        for peer, at in sorted(came.items()):
            session = state.sessions.get(peer)
            if session is None or session.slot is None or state.lost_peers.is_lost(session.slot):
                continue
            heard_at = max(at, session.heard_at)
            if session.pinged_at <= heard_at:
                if now - heard_at > DOUBT_S:
                    state.sessions.ping(session, now)
            elif now - session.pinged_at > max(DOUBT_S, 4 * session.rtt_s):
                state.lost_peers.note_lost(session.slot, now)
                state.outbox.notify(PeerStuck(peer, session.slot))
                stuck.append(peer)
        return stuck

    def _find_silent(self, now: float) -> None:
        """Close sessions with parents that are silent: the transport may not report it."""
        state = self._state
        for peer in silent_parents(state, now):
            session = state.sessions.get(peer)
            if session is not None and session.slot is not None:
                state.lost_peers.note_lost(session.slot, now)
            state.close(peer, "silent for three heartbeats")

    def stay_away(self, now: float) -> None:
        """The authority closed our session, because it keeps few: stay away until there is something to send."""
        rest_s = self._state.tuning.rest_beats * self._state.tuning.heartbeat_s
        self._rest_until = now + rest_s * self._state.rng.uniform(0.5, 1.5)

    def come_back(self) -> None:
        """There is something to send to the authority that closed our session: do not stay away any longer."""
        self._rest_until = 0.0

    def _watch_own_lease(self, now: float) -> None:
        """Contact the authority directly if our lease is not fresh, or no heartbeat comes.

        Without a fresh lease in the newest heartbeat, our reports do not arrive. Without a heartbeat, the authority is
        gone or has restarted; then its children look for it at once, and what they hear flows down the trees. The other
        members wait for a random time in both cases, so that thousands that lost one root child, or the trainer, do not
        connect at once.
        """
        state = self._state
        grant = state.grant
        if grant is None or state.leases.heartbeat is None:
            return
        late = is_late(state, now)
        fresh = state.leases.standing(grant.slot, now) is Standing.FRESH and not is_own_lease_over(state, now)
        if not late and fresh:  # the bit alone may be that of the slot's next holder
            self._turn_at = None
        elif self._is_turn(now, late=late):
            state.sessions.reach(state.swarm, self._authority, now)
            if not late and state.sessions.ready(state.swarm) and now >= self._next_appeal:
                self._next_appeal = now + state.tuning.heartbeat_s
                sealed = self.report(now)
                state.outbox.send(state.swarm, Reports(0, (sealed,)))

    @property
    def is_cut_off(self) -> bool:
        """Whether we wait for our turn to contact the authority, since reports or heartbeats do not arrive."""
        return self._turn_at is not None

    def _is_turn(self, now: float, *, late: bool) -> bool:
        """Whether it is our turn to contact the authority; `late`: no heartbeat comes.

        A member whose reports do not arrive must not wait until its lease is over.
        """
        state, roster, grant = self._state, self._state.roster, self._state.grant
        assert grant is not None
        if roster is None or any(roster.parent(k, grant.slot) == AUTHORITY for k in range(roster.stripes)):
            return True
        if not late and state.sessions.ready(state.swarm):
            return True
        if self._turn_at is None:
            tuning = state.tuning
            wait_s = self._return_s
            most_s = (tuning.hard_ttl_s - tuning.soft_ttl_s) / 3
            wait_s = wait_s + 2 * tuning.heartbeat_s if late else min(wait_s, most_s)
            self._turn_at = now + state.rng.uniform(0.0, wait_s)
        return now >= self._turn_at

    def leave(self, now: float) -> None:
        """Release the lease: send the release to the authority and to all neighbours."""
        self.leaving = True
        sealed = self.report(now, leaving=True)
        for session in self._state.sessions:
            if session.ready and sealed:
                self._state.outbox.send(session.peer, Bye(sealed))
