"""Further givers of a catch-up: members that it dials because too few of those it is connected with have the blocks.

A member is connected with its parents and children in the trees. Where few of these have the model, a catch-up takes
as long as their uplinks need, while those of other members are idle. So it dials some of the members that can be
interior in a tree: the authority plans only members so that have held a whole version.
"""

from swarm.protocol.core.reach import direct
from swarm.protocol.membership.roster import Member, Roster
from swarm.protocol.state import State

__all__ = ["Givers"]

MOST_DIALED = 16
"""Members that one catch-up dials, those that do not answer included."""
DIALS_A_GIVER = 8
"""While many members catch up, each dials only so many that a giver is dialed by this number on average. If a crowd
joins, there are none for most: the trees bring them the versions, and each newcomer gives as soon as it has one."""


class Givers:
    """The members that this member has dialed to fetch blocks from them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._dialed: set[bytes] = set()
        """In this catch-up."""
        self._left: list[tuple[Member, tuple[str, ...]]] = []
        """Members of the roster `_stamp` that may be dialed, with their addresses, in a random order; the last one is
        the next."""
        self._stamp = -1
        self._share = 0
        """How many of them this member may dial while it is connected with no giver."""
        self._next_look = float("-inf")
        """Local time."""

    def start(self) -> None:
        """A catch-up starts, or starts again: members that did not answer may be dialed again."""
        open_ = self._state.sessions.get
        self._dialed = {peer for peer in self._dialed if open_(peer) is not None}
        self._stamp = -1

    def dial_more(self, givers: int, missing: int, now: float) -> None:
        """Dial members if this member is connected with fewer givers than it has use for.

        `givers`: members that it is connected with and that have blocks, as far as known. `missing`: blocks that are
        not requested yet. Looks once in `Tuning.tick_s`.
        """
        state, tuning = self._state, self._state.tuning
        useful = min(tuning.requests_in_flight // tuning.requests_per_peer, -(-missing // tuning.requests_per_peer))
        if now < self._next_look or givers >= useful or state.roster is None:
            return
        self._next_look = now + tuning.tick_s
        if state.roster.stamp != self._stamp:
            self._choose(state.roster)
        room = min(min(useful, self._share) - givers - self._awaited(), MOST_DIALED - len(self._dialed))
        while room > 0 and self._left:
            member, addrs = self._left.pop()
            if self._may_be_dialed(member, now):
                state.sessions.reach(member.peer, addrs, now)
                self._dialed.add(member.peer)
                room -= 1

    def _may_be_dialed(self, member: Member, now: float) -> bool:
        """Whether there is no session with `member` and no dial to it, and all that is known says that it is there."""
        state, peer = self._state, member.peer
        tried = state.sessions.get(peer) is not None or state.sessions.dialing(peer)
        gone = state.sessions.failing(peer, now) or state.lost_peers.is_lost(member.slot)
        return not tried and not gone and state.leases.standing(member.slot, now).rights.content

    def _choose(self, roster: Roster) -> None:
        """Put the members of a new roster that may be dialed in a random order: who returns at the same time must not
        dial the same ones."""
        me = roster.member_of(self._state.key.public)
        self._stamp, self._left = roster.stamp, []
        if me is None:
            return
        able = [member for member in roster.members if not member.leaf and member is not me]
        self._share = DIALS_A_GIVER * len(able) // (len(roster.members) - len(able))
        reached = ((member, direct(me, member)) for member in able if member.peer not in self._dialed)
        self._left = [(member, addrs) for member, addrs in reached if addrs]
        self._state.rng.shuffle(self._left)

    def _awaited(self) -> int:
        """Members that were dialed and have neither answered nor failed to."""
        sessions = self._state.sessions
        return sum(not sessions.ready(p) and (sessions.get(p) is not None or sessions.dialing(p)) for p in self._dialed)

    def release(self) -> None:
        """The catch-up has ended: close the sessions with those that are no neighbours in the trees."""
        state = self._state
        kept = {edge.peer for edge in state.exchange.parents.edges.values()} | set(state.children())
        for peer in sorted(self._dialed - kept):
            if state.sessions.ready(peer):
                state.part(peer, "a giver of a catch-up that has ended")
        self._dialed.clear()
        self._left, self._stamp = [], -1
