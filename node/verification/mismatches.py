"""An anytime-valid test of mismatches (0 or 1 a sample): has this node more of them than the others of its class?

**The assumption.** In a class there is a rate h such that an honest node's sample is a mismatch with probability h at
most, whatever came before; and at least half of the numbers of the *other* nodes are of nodes with at least that
probability. (The others may do something about their own mismatches: half of them may have none.)

**The evidence.** For a rate g = h / 2 let M be the product of

- A, of the node's own numbers: a bet that they have a rate of q > 2g. A mismatch multiplies it by q / 2g, and none by
  (1 - q) / (1 - 2g); the mean is at most 1 where the probability is at most h.
- B, of the others' numbers: a bet that they have a rate of cg, c < 1. A mismatch multiplies it by c, and none by
  (1 - cg) / (1 - g) = 1 + e. The mean is at most 1 + e for any probability, and at most 1 - e for one of h or more. Of
  the latter there are as many at least, and (1 + e)(1 - e) < 1.

A and B are averaged over q, over the number with which the bet begins (a node may be honest for long first), and over
c, with weights that are fixed. So M is at most a test supermartingale, and by Ville's inequality (1939) it ever reaches
1 / alpha with probability alpha at most. Since nobody knows h, the evidence is the *least* M over all h: that of the
true h is no smaller. It needs no learned bound, no least history, and no share of `DELTA`: two mismatches of a node
weigh little beside 20 good samples of others, and very much beside 2,000.

**Which bets.** A bet on q wins most, q log(q / 2g) + (1 - q) log((1 - q) / (1 - 2g)) a sample, where q is the rate of
the cheat. One whose samples always mismatch loses 0.36 nats a sample by the bet on 0.7, of five or six; one with 60 %
must come through runs of good luck, for which 0.35 is better. So these two have two fifths of the weight each.

**Lying checkers.** One product counts all checkers, because no liar makes a mismatch (`node.verification.replays`). It
can leave a sample undecided, which is 0 for the node itself and 1 where the node is an "other" to somebody. So the
probability of a node's own mismatch does not rise, and that of the others' does not fall, whatever liars withhold:
nothing has to be corrected for the samples on which a liar was asked first.
"""

import math
from collections import OrderedDict
from typing import Final

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from node.verification.classes import ArithmeticClass

__all__ = ["CLASSES", "SUBJECTS", "Counts", "Tally", "evidence", "replay_context"]

RATES: Final = np.array([0.7, 0.35, 0.1, 0.02])
RATE_WEIGHTS: Final = np.array([0.4, 0.4, 0.1, 0.1])
"""The bets on a node's own rate."""
SHARES: Final = np.array([0.0, 0.2, 0.6])
SHARE_WEIGHTS: Final = np.array([0.9, 0.05, 0.05])
"""The bets on the others' rate, as shares of the rate in question."""
GRID: Final = np.geomspace(1e-7, 0.5, 161)
"""Rates g. Between two neighbours the larger one counts for the node, and the smaller one for the others."""
MOST_STARTS: Final = 64
"""Of a node's mismatches, the last ones that are kept as starts of a bet. Leaving others out lowers the evidence."""
SAME_CLASS: Final = 0.9
"""The weight of the tally that a node begins with; those after a change of its class share the rest."""
CLASSES: Final = 64
"""Classes whose counts are kept, the last ones used."""
SUBJECTS: Final = 1024
"""Nodes of a class whose counts are kept apart. The counts of the one seen first are then nobody's."""
NOBODY: Final = b""

Floats = NDArray[np.float64]


class Tally(msgspec.Struct, array_like=True):
    """One node's own numbers in one class."""

    context: bytes = b""
    changes: int = 0
    """Of its class so far: its numbers begin anew with each, at a price that keeps the bound."""
    numbers: int = 0
    starts: list[int] = msgspec.field(default_factory=list)
    """Which of its numbers, from 1 on, were the last mismatches."""
    log: float = 0.0
    """The evidence as of the last number, a natural logarithm."""

    def add(self, context: bytes, *, mismatch: bool, others: tuple[int, int]) -> None:
        """One more number. `others`: (mismatches, numbers) of the other nodes of the class."""
        if context != self.context:
            self.changes += bool(self.numbers)
            self.context, self.numbers, self.starts = context, 0, []
        self.numbers += 1
        if mismatch:
            self.starts = [*self.starts[1 - MOST_STARTS :], self.numbers]
        self.log = evidence(self, *others)


def evidence(tally: Tally, mismatches: int, numbers: int) -> float:
    """The evidence against a node, a natural logarithm. `mismatches` among `numbers`: those of the others."""
    changes = tally.changes
    weight = math.log(SAME_CLASS if changes == 0 else (1.0 - SAME_CLASS) / (changes * (changes + 1)))
    own = _own(np.minimum(2.0 * GRID, 1.0), tally)
    others = np.concatenate([[0.0], _others(GRID[:-1], mismatches, numbers - mismatches)])
    return weight + float((own + others).min())


def _own(rates: Floats, tally: Tally) -> Floats:
    """log A for each rate 2g. The bet that begins with number n has the weight 1 / n (n + 1); only those that begin
    with the first number or with a mismatch are counted, and those that have not begun. A mismatch that is no longer
    kept counts as none."""
    kept = np.array(tally.starts, np.float64)
    begins = np.unique(np.concatenate([[1.0], kept]))
    ones = (kept >= begins[:, None]).sum(1).astype(np.float64)
    zeros = np.maximum(tally.numbers - begins + 1.0 - ones, 0.0)
    q, h = RATES[:, None], np.minimum(rates, 1.0 - 1e-9)
    won, lost = np.log(q / h), np.log1p(-q) - np.log1p(-h)
    logs = ones[:, None, None] * won + zeros[:, None, None] * lost - np.log(begins * (begins + 1.0))[:, None, None]
    bets = np.logaddexp(np.logaddexp.reduce(logs, axis=0), -math.log(tally.numbers + 1.0))
    return np.logaddexp.reduce(np.where(q > h, bets, 0.0) + np.log(RATE_WEIGHTS)[:, None], axis=0)


def _others(rates: Floats, mismatches: int, good: int) -> Floats:
    """log B for each rate g."""
    shares = SHARES[:, None]
    with np.errstate(divide="ignore"):
        lost = mismatches * np.log(shares) if mismatches else np.zeros_like(shares)
    logs = lost + good * (np.log1p(-shares * rates) - np.log1p(-rates))
    return np.logaddexp.reduce(logs + np.log(SHARE_WEIGHTS)[:, None], axis=0)


def replay_context(kind: str, own: ArithmeticClass, *, adapted: bool = False) -> bytes:
    """16 bytes that name what is counted together: one kind of number in one class, whatever the sampling. `adapted`:
    of samples that were drawn with adapters, which other kernels compute."""
    return blake3(b"replay\0" + kind.encode() + b"\0" + own.name.encode() + b"\0adapter" * adapted).digest(16)


class _Class:
    """(mismatches, numbers) of each node, and of all."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, tuple[int, int]] = {}
        self.all = (0, 0)

    def add(self, node: bytes, mismatches: int, numbers: int) -> None:
        before = self.nodes.get(node, (0, 0))
        self.nodes[node] = (before[0] + mismatches, before[1] + numbers)
        self.all = (self.all[0] + mismatches, self.all[1] + numbers)

    def take(self, node: bytes) -> tuple[int, int]:
        mismatches, numbers = self.nodes.pop(node, (0, 0))
        self.all = (self.all[0] - mismatches, self.all[1] - numbers)
        return mismatches, numbers


class Counts:
    """The mismatches of all nodes, by class. An undecided sample counts as one."""

    def __init__(self) -> None:
        self._classes: OrderedDict[bytes, _Class] = OrderedDict()

    def __len__(self) -> int:
        return len(self._classes)

    def add(self, context: bytes, node: bytes, mismatches: int, numbers: int = 1) -> None:
        """So many more `numbers` of `node`."""
        found = self._classes.setdefault(context, _Class())
        self._classes.move_to_end(context)
        found.add(node, mismatches, numbers)
        if len(found.nodes) > SUBJECTS:
            found.add(NOBODY, *found.take(next(key for key in found.nodes if key != NOBODY)))
        while len(self._classes) > CLASSES:
            self._classes.popitem(last=False)

    def others(self, context: bytes, node: bytes) -> tuple[int, int]:
        """(mismatches, numbers) of all but `node`."""
        if (found := self._classes.get(context)) is None:
            return 0, 0
        own = found.nodes.get(node, (0, 0))
        return found.all[0] - own[0], found.all[1] - own[1]

    def forget(self, node: bytes) -> None:
        """The numbers of `node` no longer count: it was proven to lie."""
        for found in self._classes.values():
            found.take(node)
