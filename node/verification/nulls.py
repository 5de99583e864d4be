"""What honest numbers are like, learned from the traffic itself: one null for each context and node.

A *context* is a kind of number, the two arithmetic classes, the order of magnitude of the length, and how the tokens
were drawn: numbers of one context are comparable. The null for a node is learned from the numbers of the *other* nodes
of its class, so that a cheat does not become its own measure; only a node that has no other beside it is measured by
its own earlier numbers.

Checkers may lie about honest nodes so as to lower the null. So the numbers of the `dropped(m)` of m checkers that find
the least are left out: a liar whose numbers are kept then finds no less than an honest checker that is left out. Each
learning is allowed to fail with a smaller probability than the one before, so that all of them together stay below
`DELTA`.
"""

import math
from array import array
from collections import OrderedDict
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from node.verification.classes import ArithmeticClass
from node.verification.evidence import DELTA, RANGE_SHARE, Null, dropped
from node.verification.opinions import REACH, Kind

__all__ = ["CONTEXTS", "Nulls", "context_of"]

LEAST_NUMBERS: Final = 16
"""Numbers of a checker about other nodes, before it counts."""
LEAST_KEPT: Final = 384
"""Numbers that a null is learned from, at least. The bound on n numbers lies about 25 / n of the range above their
mean, because it may fail so seldom; with fewer numbers the test has hardly any power."""
WINDOW: Final = 2048
"""The newest numbers of a checker that count: honest numbers may drift with the version. 16 bytes each, so all
contexts together have 38 MB at most."""
CONTEXTS: Final = 64
"""Contexts remembered, the last ones used."""
CHECKERS: Final = 16
"""Checkers remembered in each context, the first ones."""
GROWTH: Final = 1.5
"""The null is learned again when this many times as many numbers are known, and after each half of `WINDOW` of one
checker's."""
SHARE: Final = 1.0 / (len(REACH) * CONTEXTS)
"""The part of `DELTA` that is spent on one context."""


def context_of(
    kind: Kind, subject: ArithmeticClass, checker: ArithmeticClass, tokens: int, drawn: bytes = b""
) -> bytes:
    """16 bytes that name a context. `drawn`: what else decides the distribution, as the temperature."""
    magnitude = min(max(tokens, 1).bit_length() // 2, 7)
    parts = (kind, subject.name, checker.name, str(magnitude))
    return blake3("\0".join(parts).encode() + b"\0" + drawn).digest(16)


class _Numbers:
    """The last numbers of one checker, and whom each is about."""

    def __init__(self) -> None:
        self._values, self._subjects = array("d"), array("q")

    def add(self, subject: bytes, value: float) -> None:
        self._values.append(value)
        self._subjects.append(_short(subject))
        if len(self._values) >= WINDOW + WINDOW // 8:  # now and then, because it moves all of them
            self._take(np.arange(len(self._values)) >= len(self._values) - WINDOW)

    def about_others(self, subject: bytes | None) -> NDArray[np.float64]:
        """The numbers that are not about `subject`, oldest first."""
        values = np.array(self._values[-WINDOW:])
        return values if subject is None else values[np.array(self._subjects[-WINDOW:]) != _short(subject)]

    def forget(self, subject: bytes) -> None:
        self._take(np.array(self._subjects) != _short(subject))

    def _take(self, kept: NDArray[np.bool_]) -> None:
        self._values = array("d", np.array(self._values)[kept].tobytes())
        self._subjects = array("q", np.array(self._subjects)[kept].tobytes())


def _short(subject: bytes) -> int:
    return int.from_bytes(blake3(subject).digest(8), "little", signed=True)


class _Context:
    """The numbers of one context, by checker."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, _Numbers] = {}
        self.seen = 0
        self.learned_at = 0
        self.learned = 0
        self.nulls: dict[bytes, Null | None] = {}

    def add(self, checker: bytes, subject: bytes, value: float) -> None:
        if checker not in self.numbers and len(self.numbers) >= CHECKERS:
            return
        self.numbers.setdefault(checker, _Numbers()).add(subject, value)
        self.seen += 1
        step = min(self.learned_at * (GROWTH - 1.0), WINDOW / 2 * len(self.numbers))
        if self.seen >= LEAST_KEPT and self.seen >= self.learned_at + max(step, LEAST_KEPT / 4):
            self.learned_at, self.nulls = self.seen, {}
            self.learned += 1

    def null(self, subject: bytes, reach: float) -> Null | None:
        if subject not in self.nulls:
            self.nulls[subject] = self._learn(subject, reach) if self.learned else None
        return self.nulls[subject]

    def _learn(self, subject: bytes, reach: float) -> Null | None:
        found = self._numbers(subject)
        if not found:  # it is alone in its class
            found = self._numbers(None)
        found = [values for values in found if len(values) >= LEAST_NUMBERS]
        found.sort(key=lambda values: float(np.mean(values)))
        kept = found[dropped(len(found)) :]
        if sum(len(values) for values in kept) < LEAST_KEPT:
            return None
        cuts = [int(len(values) * RANGE_SHARE) for values in kept]
        first = np.concatenate([values[:cut] for values, cut in zip(kept, cuts, strict=True)])
        rest = np.concatenate([values[cut:] for values, cut in zip(kept, cuts, strict=True)])
        return Null.fitted(first, rest, reach, DELTA * SHARE / (self.learned * (self.learned + 1)))

    def _numbers(self, left_out: bytes | None) -> list[NDArray[np.float64]]:
        """By checker, its numbers about all nodes but one."""
        found = (numbers.about_others(left_out) for numbers in self.numbers.values())
        return [values for values in found if len(values)]


class Nulls:
    """The numbers of all contexts."""

    def __init__(self) -> None:
        self._contexts: OrderedDict[bytes, _Context] = OrderedDict()

    def __len__(self) -> int:
        return len(self._contexts)

    def add(self, context: bytes, checker: bytes, subject: bytes, value: float) -> None:
        """`checker` found this number about `subject`. Raises `ValueError` when it is not finite."""
        if not math.isfinite(value):
            raise ValueError("null: a number that is not finite")
        found = self._contexts.pop(context, None) or _Context()
        self._contexts[context] = found
        found.add(checker, subject, value)
        while len(self._contexts) > CONTEXTS:
            self._contexts.popitem(last=False)

    def of(self, context: bytes, subject: bytes, reach: float) -> Null | None:
        """The null for `subject`, or None while too little is known. Ask before the number at hand is added."""
        found = self._contexts.get(context)
        return None if found is None else found.null(subject, reach)

    def forget(self, node: bytes) -> None:
        """Numbers about and by `node` no longer count: it was proven to lie."""
        for context in self._contexts.values():
            context.numbers.pop(node, None)
            for numbers in context.numbers.values():
                numbers.forget(node)
            context.nulls = {}
