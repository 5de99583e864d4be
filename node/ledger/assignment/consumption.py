"""How fast a trainer takes samples, and how many may therefore be begun for it. Pure.

Nodes that are faster than their trainer must pause: what they generate beyond what the trainer takes becomes too old
and is generated again. So the samples of a session that are leased or done, and not taken, are limited to what the
trainer will still take before a sample begun now is too old:

- `step`: samples taken from one seal to the next, a moving average.
- `gather`: the same, over the seals between which any were taken: a trainer may publish several times per batch.
- `taken`: samples used since the last seal, the group in hand included.
- `waiting`: the share of its time in which the trainer waited for a group, a moving average.

A trainer that never waits gets one step's samples in advance, from nodes that hold the newest version. A trainer that
waits gets as many as it can take: the rest of this step, and one step more for each version of lag. Until a whole step
was seen there is no limit while the trainer waits; when it stops waiting, the limit is what the nodes hold at once.
"""

from dataclasses import dataclass
from typing import Final

from node.ledger.part_history import BASE

__all__ = ["Consumption"]

WEIGHT: Final = 0.5
"""The weight of the newest step: a changed batch size is known after two or three steps."""
WAITS_MUCH: Final = 0.05
"""A trainer that waits for this share of its time is that much slower than it could be: as many samples as it can use
are generated for it."""
MORE: Final = 0.5
"""The share of a step that is generated beyond it, for a trainer that waits although it has taken a step's samples."""


@dataclass(slots=True)
class Consumption:
    """One session's. Times are the caller's clock, in seconds."""

    max_lag: int
    """The lag that its groups allow."""
    since: float
    """The last seal, or the opening of the session."""
    waits_since: float | None
    """Since when the trainer has taken every complete group and waits for another. None: it has groups to use."""
    part: str = BASE
    """The part that its groups are work of. Only seals of versions that age such work count here."""
    hand: int = 0
    """Samples of the group that the trainer is using: it confirms a group when it asks for the next."""
    step: float | None = None
    """None: no whole step was seen yet."""
    gather: float = 0.0
    waiting: float = 1.0
    _confirmed: int = 0
    """Samples that the trainer has confirmed since the last seal, less those that it had in hand then."""
    _waited_s: float = 0.0
    _first: int | None = None
    """Samples taken before the first seal. None: there was none."""

    def take(self, samples: int, left: int, now: float) -> None:
        """The trainer confirmed `samples`; complete groups with `left` samples are ready for it."""
        self._confirmed += samples
        self.hand = min(left, samples or left)
        if not left and self.waits_since is None:
            self.waits_since = now

    def give(self, samples: int, now: float) -> None:
        """A group of `samples` is complete: the trainer need not wait."""
        if self.waits_since is not None:
            self._waited_s += now - max(self.since, self.waits_since)
            self.waits_since = None
            self.hand = samples

    @property
    def taken(self) -> int:
        return max(0, self._confirmed + self.hand)

    def seal(self, now: float) -> None:
        """A version was sealed: a step is over."""
        waited_s = self._waited_s + (0.0 if self.waits_since is None else now - max(self.since, self.waits_since))
        share = min(1.0, waited_s / (now - self.since)) if now > self.since else self.waiting
        if self._first is None:
            self._first = self.taken
        elif self.step is None:
            self.step, self.waiting = float(self.taken), share
            self.gather = self.step
        else:
            if self.taken:
                self.gather += (WEIGHT if self.gather else 1.0) * (self.taken - self.gather)
            self.step += WEIGHT * (self.taken - self.step)
            self.waiting += WEIGHT * (share - self.waiting)
        self.since, self._confirmed, self._waited_s = now, -self.hand, 0.0

    @property
    def hurry(self) -> float:
        """0: the trainer has all that it can use. 1: it waits for samples, now or for much of its time.

        Without lag it always waits, because nothing can be generated for it before its version is published.
        """
        if self.waits_since is not None or self.max_lag == 0:
            return 1.0
        return min(1.0, self.waiting / WAITS_MUCH)

    def most_begun(self, spare: int, held: int) -> float | None:
        """The limit on samples that are leased or done, and not taken, for beginning one more. None: no limit.

        `spare` is how many more seals leave the tokens of the new sample's version young enough; `held` is how many
        sequences all nodes hold at once.
        """
        if self.step is None:
            return None if self.waits_since is not None else float(max(held, self._first or 0, self.taken))
        rest = self._this_step() - self.taken
        if rest <= 0:
            rest = 0.0 if self.waits_since is None else max(1.0, MORE * self._this_step())
        if spare <= 0:
            return self.hurry * rest
        return self.step + self.hurry * (rest + (spare - 1) * self.step)

    def most_open(self) -> float | None:
        """The limit on samples that are offered and not taken. None: consumption sets no limit."""
        if self.step is None:
            return None
        return self._this_step() * (1.0 + MORE) + self.hurry * self.max_lag * self.step

    def _this_step(self) -> float:
        """Samples that it takes before the next seal; a trainer that waits has begun to gather a batch."""
        assert self.step is not None
        return self.step if self.waits_since is None else max(self.step, self.gather)
