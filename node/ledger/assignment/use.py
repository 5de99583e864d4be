"""How fast a trainer takes samples, and how many may therefore be begun for it. Pure.

Nodes that are faster than their trainer must stop drawing: what they draw beyond what the trainer takes becomes too old
and is drawn again. So the samples of a session that are leased or done, and not taken, are limited by what the trainer
will still take before a sample begun now is too old:

- `step`: samples that it takes from one seal to the next, an average that forgets.
- `gather`: the same over the seals between which it took any: a trainer may publish several times for each batch.
- `taken`: samples that it has used since the last seal, the group that it has in hand included.
- `waiting`: the share of its time in which it waited for a group, an average that forgets.

A trainer that never waits gets one step's samples drawn ahead, by nodes that hold the newest version. One that waits
gets as many as it can take at all: the rest of this step, and a step more for each version of lag. Before a whole step
was seen, and while it waits then, there is no limit; when it stops waiting, as much as the nodes hold at once.
"""

from dataclasses import dataclass
from typing import Final

__all__ = ["Use"]

WEIGHT: Final = 0.5
"""Of the newest step: a trainer that changes its batch is known after two or three steps."""
WAITS_MUCH: Final = 0.05
"""A trainer that waits this share of its time is slower by it than it could be: everything usable is drawn for it."""
MORE: Final = 0.5
"""Of a step: so much more is drawn for a trainer that waits although it has taken a step's samples."""


@dataclass(slots=True)
class Use:
    """Of one session. `max_lag`: as its groups have it. Times are the caller's clock, s."""

    max_lag: int
    since: float
    """The last seal, or the opening of the session."""
    waits_since: float | None
    """The trainer has taken every complete group, and waits for another since then. None: it has groups to use."""
    hand: int = 0
    """Samples of the group that it has in hand: it says that it has taken a group when it asks for the next."""
    step: float | None = None
    """None: no whole step was seen yet."""
    gather: float = 0.0
    waiting: float = 1.0
    _said: int = 0
    """Samples that it has said it has taken since the last seal, less those that it had in hand then."""
    _waited_s: float = 0.0
    _first: int | None = None
    """Samples taken before the first seal; None: there was none."""

    def take(self, samples: int, left: int, now: float) -> None:
        """The trainer has taken `samples`; `left` samples of complete groups are there for it."""
        self._said += samples
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
        return max(0, self._said + self.hand)

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
        self.since, self._said, self._waited_s = now, -self.hand, 0.0

    @property
    def hurry(self) -> float:
        """0: the trainer has all that it can use. 1: it waits for samples, now or for much of its time.

        Without lag it always waits: nothing can be drawn for it before its version is there.
        """
        if self.waits_since is not None or self.max_lag == 0:
            return 1.0
        return min(1.0, self.waiting / WAITS_MUCH)

    def most_begun(self, spare: int, held: int) -> float | None:
        """How many samples may be leased or done, and not taken, when one more is begun at a version of which `spare`
        more seals make no token too old. `held`: what all nodes hold at once. None: no limit."""
        if self.step is None:
            return None if self.waits_since is not None else float(max(held, self._first or 0, self.taken))
        rest = self._now() - self.taken
        if rest <= 0:
            rest = 0.0 if self.waits_since is None else max(1.0, MORE * self._now())
        if spare <= 0:
            return self.hurry * rest
        return self.step + self.hurry * (rest + (spare - 1) * self.step)

    def most_open(self) -> float | None:
        """How many samples may be asked for and not taken. None: no limit by use."""
        if self.step is None:
            return None
        return self._now() * (1.0 + MORE) + self.hurry * self.max_lag * self.step

    def _now(self) -> float:
        """How many samples it takes before the next seal: one that waits has begun to gather."""
        assert self.step is not None
        return self.step if self.waits_since is None else max(self.step, self.gather)
