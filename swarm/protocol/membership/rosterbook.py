"""The roster as one peer holds it: the newest that it has, the last changes, and whom to ask for what it lacks.

Changes come down two trees, which rotate. One that overtook another waits for it; a gap (the heartbeat, a hello or a
change names a roster that we do not have) is asked for: of whoever named it, of any neighbour, of the authority last.
"""

from collections import OrderedDict

from swarm.protocol.core.boots import MAX_BOOT
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.membership.roster import Roster, advance, open_change, open_whole, whole
from swarm.protocol.membership.session import Session, Sessions

__all__ = ["RosterBook"]

LOG_CHANGES = 128
LOG_BYTES = 256 << 10
"""Changes kept for others: at ten a minute those of ten minutes. Who slept longer is given the roster whole."""
SMALL = 64
"""A roster of so many members is 8 KB: the trainer can give it to each of them."""
WAITING = 32
"""Changes that came before the one they follow: few, for trees keep order."""


class RosterBook:
    """Holds what was verified. `roster` is None until the first came."""

    def __init__(self, swarm: bytes, tuning: Tuning) -> None:
        self._swarm = swarm
        self._tuning = tuning
        self.roster: Roster | None = None
        self.proof = b""
        """The sealed change that led to it."""
        self._log: OrderedDict[int, bytes] = OrderedDict()
        """By the stamp that each changes, in order."""
        self._log_bytes = 0
        self._waiting: dict[int, bytes] = {}
        self._heard_of = 0
        self._behind_since = 0.0
        self._next_ask = 0.0

    @property
    def stamp(self) -> int:
        return 0 if self.roster is None else self.roster.stamp

    # ------------------------------------------------------------ what comes

    def set(self, roster: Roster, proof: bytes) -> None:
        """The authority's own next roster."""
        self._note(proof)
        self.roster, self.proof = roster, proof

    def take_whole(self, data: bytes, latest_boot: int = MAX_BOOT) -> bool:
        """True when it is news, and of no boot after `latest_boot`. `PeerError` when it is forged or no plan."""
        roster, proof = open_whole(data, self._swarm)
        if roster.stamp <= self.stamp or roster.boot > latest_boot:
            return False
        self._log.clear()
        self._log_bytes = 0
        self.roster, self.proof = roster, proof
        self._follow()
        return True

    def take_step(self, sealed: bytes, now: float, latest_boot: int = MAX_BOOT) -> bool:
        """True when our roster moved on. `PeerError` when it is forged, or does not fit. One of a boot after
        `latest_boot` is passed over."""
        if sealed == self.proof:
            return False
        change = open_change(sealed, self._swarm)
        if change.stamp <= self.stamp or change.stamp >> 32 > latest_boot:
            return False
        self.hear_of(change.stamp, now)
        if change.base == 0:
            self._behind_since = float("-inf")  # no other change leads there: no use in waiting for one
        if len(self._waiting) < WAITING and change.base:
            self._waiting[change.base] = sealed
        return self._follow()

    def _follow(self) -> bool:
        """Apply what waits for the roster that we have."""
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

    # ------------------------------------------------------------ what others lack

    def since(self, stamp: int) -> list[bytes] | None:
        """The changes that lead from that roster to ours; None when we do not have them all."""
        steps: list[bytes] = []
        for base, sealed in self._log.items():
            if base == stamp or steps:
                steps.append(sealed)
        return steps if steps or stamp == self.stamp else None

    def whole(self) -> bytes:
        return b"" if self.roster is None else whole(self.roster, self.proof)

    # ------------------------------------------------------------ what we lack

    def hear_of(self, stamp: int, now: float) -> None:
        """Somebody named a roster."""
        if stamp > max(self._heard_of, self.stamp):
            if self._heard_of <= self.stamp:
                self._behind_since = now
            self._heard_of = stamp

    def whom_to_ask(
        self, sessions: Sessions, authority: bytes, now: float, *, admitted_at: float, head: bool
    ) -> bytes | None:
        """Whom to ask for the roster, now; None when there is no need, or nobody.

        A change that is on its way needs no asking: half a heartbeat passes first, unless we have no roster at all.
        The authority is asked at once by those that hang on it (`head`) and in small swarms, else when nobody has it.
        """
        if self.roster is not None:
            patient = now - self._behind_since < self._tuning.heartbeat_s / 2
            if self._heard_of <= self.stamp or patient:
                return None
        if now < self._next_ask:
            return None
        ready = [s for s in sessions if s.ready and not s.closing and s.peer != authority]
        knowing = [s for s in ready if s.roster > self.stamp]
        since = admitted_at if self.roster is None else self._behind_since
        small = self.roster is not None and len(self.roster.members) <= SMALL
        patient = not (head or small) and now - since <= self._tuning.pull_deadline_s
        if not knowing and not patient and sessions.ready(authority):
            knowing = [session] if (session := sessions.get(authority)) is not None else []
        if not knowing:
            return None
        self._next_ask = now + self._tuning.pull_deadline_s
        return min(knowing, key=_least_asked).peer


def _least_asked(session: Session) -> tuple[float, int, bytes]:
    return session.wanted_roster_at, -session.roster, session.peer
