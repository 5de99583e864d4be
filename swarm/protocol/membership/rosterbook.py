"""The roster book of a peer: the newest roster that it holds, the last changes, and the peer to ask for missing ones.

Changes come down two trees, which rotate. A change that arrives before the one it follows waits for it. If a heartbeat,
a hello or a change names a roster that we lack, we request it: from a peer that named it, and from the authority last.
"""

from collections import OrderedDict

from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.membership.roster import Roster, advance, open_change, open_whole, whole
from swarm.protocol.membership.session import Session, Sessions

__all__ = ["RosterBook"]

LOG_CHANGES = 128
LOG_BYTES = 256 << 10
"""Bounds of the changes kept for others: ten minutes at ten a minute. A peer that lacks more gets the whole roster."""
SMALL = 64
"""Members: a roster of this size is 8 KB, which the authority can give to every member."""
WAITING = 32
"""Upper bound of the changes that wait for the one they follow: few, since trees keep order."""


class RosterBook:
    """Holds verified rosters and changes. `roster` is None until the first one came."""

    def __init__(self, swarm: bytes, tuning: Tuning) -> None:
        self._swarm = swarm
        self._tuning = tuning
        self.roster: Roster | None = None
        self.proof = b""
        """The sealed change that led to `roster`."""
        self._log: OrderedDict[int, bytes] = OrderedDict()
        """The last changes, in order, by the stamp of the roster that each changes."""
        self._log_bytes = 0
        self._waiting: dict[int, bytes] = {}
        self._heard_of = 0
        self._behind_since = 0.0
        self._next_ask = 0.0

    @property
    def stamp(self) -> int:
        return 0 if self.roster is None else self.roster.stamp

    # ------------------------------------------------------------ updates

    def set(self, roster: Roster, proof: bytes) -> None:
        """Set the next roster, at the authority."""
        self._note(proof)
        self.roster, self.proof = roster, proof

    def take_whole(self, data: bytes, latest_boot: int = MAX_BOOT) -> bool:
        """Take a whole roster; True if it is new, and of a boot up to `latest_boot`.

        Raises `PeerError` if it is forged or not a valid plan.
        """
        roster, proof = open_whole(data, self._swarm)
        if roster.stamp <= self.stamp or roster.boot > latest_boot:
            return False
        self._log.clear()
        self._log_bytes = 0
        self.roster, self.proof = roster, proof
        self._follow()
        return True

    def take_step(self, sealed: bytes, now: float, latest_boot: int = MAX_BOOT) -> bool:
        """Take a change; True if our roster advanced. A change of a boot after `latest_boot` is ignored.

        Raises `PeerError` if it is forged or does not lead to a valid plan.
        """
        if sealed == self.proof:
            return False
        change = open_change(sealed, self._swarm)
        if change.stamp <= self.stamp or change.stamp >> 32 > latest_boot:
            return False
        self.hear_of(change.stamp, now)
        if change.base == 0:
            self._behind_since = float("-inf")  # no change leads to this roster, so do not wait for one
        if len(self._waiting) < WAITING and change.base:
            self._waiting[change.base] = sealed
        return self._follow()

    def _follow(self) -> bool:
        """Apply the waiting changes that follow our roster; whether there were any."""
        moved = False
        while self.roster is not None and (sealed := self._waiting.pop(self.roster.stamp, None)) is not None:
            after = advance(self.roster, sealed, self._swarm)
            self._note(sealed)
            self.roster, self.proof, moved = after, sealed, True
        self._waiting = {base: sealed for base, sealed in self._waiting.items() if base > self.stamp}
        return moved

    def _note(self, sealed: bytes) -> None:
        base = open_change(sealed, self._swarm).base
        if base == 0:
            self._log.clear()
            self._log_bytes = 0
            return
        self._log[base] = sealed
        self._log_bytes += len(sealed)
        while len(self._log) > LOG_CHANGES or self._log_bytes > LOG_BYTES:
            self._log_bytes -= len(self._log.popitem(last=False)[1])

    # ------------------------------------------------------------ for others

    def since(self, stamp: int) -> list[bytes] | None:
        """The changes from the roster with this stamp to ours; None if we do not have them all."""
        steps: list[bytes] = []
        for base, sealed in self._log.items():
            if base == stamp or steps:
                steps.append(sealed)
        return steps if steps or stamp == self.stamp else None

    def whole(self) -> bytes:
        return b"" if self.roster is None else whole(self.roster, self.proof)

    # ------------------------------------------------------------ missing changes

    def hear_of(self, stamp: int, now: float) -> None:
        """A peer named a roster with this stamp."""
        if stamp > max(self._heard_of, self.stamp):
            if self._heard_of <= self.stamp:
                self._behind_since = now
            self._heard_of = stamp

    @property
    def is_behind(self) -> bool:
        """Whether we have no roster, or a peer named a newer one."""
        return self.roster is None or self._heard_of > self.stamp

    def whom_to_ask(
        self, sessions: Sessions, authority: bytes, now: float, *, admitted_at: float, root_child: bool
    ) -> bytes | None:
        """The peer to ask for the roster now; None if there is no need, or no such peer.

        A missing change is probably in flight, so we wait half a heartbeat first, unless we have no roster at all. The
        authority is asked at once by its root children (`root_child`) and in small swarms, and otherwise if no peer has
        the roster after `pull_deadline_s`.
        """
        if not self.is_behind:
            return None
        if self.roster is not None and now - self._behind_since < self._tuning.heartbeat_s / 2:
            return None
        if now < self._next_ask:
            return None
        ready = [s for s in sessions if s.ready and not s.closing and s.peer != authority]
        knowing = [s for s in ready if s.roster > self.stamp]
        since = admitted_at if self.roster is None else self._behind_since
        small = self.roster is not None and len(self.roster.members) <= SMALL
        patient = not (root_child or small) and now - since <= self._tuning.pull_deadline_s
        if not knowing and not patient and sessions.ready(authority):
            knowing = [session] if (session := sessions.get(authority)) is not None else []
        if not knowing:
            return None
        self._next_ask = now + self._tuning.pull_deadline_s
        return min(knowing, key=_least_asked).peer


def _least_asked(session: Session) -> tuple[float, int, bytes]:
    return session.wanted_roster_at, -session.roster, session.peer
