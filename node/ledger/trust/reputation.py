"""Reputation: counts a node's recent failures, and decides when they are too many. Pure."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from node.ledger.messages import Reason
from node.ledger.settings import Settings

__all__ = ["BLAMED", "Penalty", "Reputation"]

BLAMED: Final = frozenset(
    {
        Reason.MALFORMED,
        Reason.BAD_SIGNATURE,
        Reason.WRONG_WORK,
        Reason.WRONG_NODE,
        Reason.WRONG_ROOT,
        Reason.COPIED,
        Reason.TOO_FAST,
    }
)
"""Reasons that count against a node: no network, restart or race makes an honest node send such rollouts. Late, stale
and repeated rollouts do not count."""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Why a node is in quarantine, and until when by the ledger's clock (None: until a person releases it)."""

    why: str
    until: float | None


@dataclass(slots=True)
class Reputation:
    """One node's record."""

    judged: deque[Reason | None] = field(default_factory=deque)
    """The verdicts on its last rollouts; None: accepted."""
    leases: deque[bool] = field(default_factory=deque)
    """By lease, for its last leases: whether it expired without progress."""
    penalty: Penalty | None = None
    """Set while it is in quarantine."""
    times: int = 0
    """Quarantines so far, ended ones included."""
    checked: int = 0
    """Its rollouts that another node confirmed."""
    disputed: int = 0
    """Its rollouts that one node disputed and no third node could decide."""

    def note(self, outcome: Reason | None, settings: Settings) -> str | None:
        """Count a verdict. Returns why the node should be in quarantine, or None."""
        self.judged.append(outcome)
        _trim(self.judged, settings)
        wrong = self.judged.count(Reason.WRONG_REWARD)
        if wrong >= settings.wrong_rewards:
            return (
                f"{wrong} of the rewards in its last {len(self.judged)} results are not those that other nodes compute"
            )
        bad = [reason for reason in self.judged if reason is not None and reason in BLAMED]
        if len(bad) >= max(settings.bad_least, settings.bad_share * len(self.judged)):
            worst = max(sorted(set(bad)), key=bad.count)
            return f"{len(bad)} of its last {len(self.judged)} results were bad, mostly: {worst}"
        return None

    def note_lease(self, lapsed: bool, settings: Settings) -> str | None:
        """Count a lease that ended; `lapsed`: it expired without progress. Returns why the node should be in
        quarantine, or None."""
        self.leases.append(lapsed)
        _trim(self.leases, settings)
        count = sum(self.leases)
        if count >= max(settings.lapsed_least, settings.lapsed_share * len(self.leases)):
            return f"{count} of its last {len(self.leases)} leases ran out without a result"
        return None

    def term_s(self, settings: Settings) -> float:
        """Seconds of the next quarantine: twice as long each time."""
        return min(settings.quarantine_s * 2.0 ** min(self.times, 32), settings.quarantine_most_s)

    def clear(self) -> None:
        """Forget the failures; those before a quarantine do not count after it."""
        self.judged.clear()
        self.leases.clear()


def _trim(memory: deque, settings: Settings) -> None:
    while len(memory) > settings.judged_window:
        memory.popleft()
