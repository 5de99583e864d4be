"""How a node behaves: what it sent lately that no honest node sends, and whether it may work. No clock, no rules of
acceptance: only when enough is enough."""

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
"""No network, restart or race makes an honest node send these. Late, stale and repeated results say nothing."""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Why a node is in quarantine, and until when by the ledger's clock (None: until somebody releases it)."""

    why: str
    until: float | None


@dataclass(slots=True)
class Reputation:
    """One node's record."""

    judged: deque[Reason | None] = field(default_factory=deque)
    """What became of its last results; None: accepted."""
    leases: deque[bool] = field(default_factory=deque)
    """Of its last leases, whether they ran out with nothing to show."""
    penalty: Penalty | None = None
    times: int = 0
    """Quarantines so far, those that are over included."""
    checked: int = 0
    """Its samples that another node confirmed."""
    disputed: int = 0
    """Its samples that one node doubted and no third could judge."""

    def note(self, outcome: Reason | None, settings: Settings) -> str | None:
        """A result was judged. Why that is enough, or None."""
        self.judged.append(outcome)
        _trim(self.judged, settings)
        bad = [reason for reason in self.judged if reason is not None and reason in BLAMED]
        if len(bad) >= max(settings.bad_least, settings.bad_share * len(self.judged)):
            worst = max(sorted(set(bad)), key=bad.count)
            return f"{len(bad)} of its last {len(self.judged)} results were bad, mostly: {worst}"
        return None

    def note_lease(self, lapsed: bool, settings: Settings) -> str | None:
        """A lease ended. `lapsed`: it ran out, and nothing ever came of it. Why that is enough, or None."""
        self.leases.append(lapsed)
        _trim(self.leases, settings)
        count = sum(self.leases)
        if count >= max(settings.lapsed_least, settings.lapsed_share * len(self.leases)):
            return f"{count} of its last {len(self.leases)} leases ran out without a result"
        return None

    def term_s(self, settings: Settings) -> float:
        """How long the next quarantine lasts: twice as long each time."""
        return min(settings.quarantine_s * 2.0 ** min(self.times, 32), settings.quarantine_most_s)

    def clear(self) -> None:
        """What was before a quarantine does not count after it."""
        self.judged.clear()
        self.leases.clear()


def _trim(memory: deque, settings: Settings) -> None:
    while len(memory) > settings.judged_window:
        memory.popleft()
