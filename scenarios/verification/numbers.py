"""What the product finds in samples that were recorded: numbers of readings in one pass, and mismatches of replays.

The functions are those of `node.verification`; here they are called for each sample of a record.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from node.engines.base import MIN_LOGPROB
from node.ledger.settings import Settings
from node.verification.opinions import (
    AT_ONCE,
    AT_ONCE_TOKENS,
    TOKEN_AT_ONCE,
    Kind,
    Opinion,
    author_numbers,
    difference,
    worst_token,
)
from node.verification.replays import is_alike

__all__ = ["ONE_PASS", "Columns", "mismatches", "numbers", "proven_at_once"]

ONE_PASS = (Kind.STALE, Kind.DRAWN, Kind.CLAIMS)
"""Kinds of numbers of a checker that reads in one pass."""

Floats = NDArray[np.float64]
Columns = Mapping[str, Floats]


def _samples(ends: NDArray[np.int64], columns: Columns, names: tuple[str, ...]) -> Iterator[list[Floats]]:
    parts = [np.split(columns[name], ends[:-1]) for name in names]
    return (list(sample) for sample in zip(*parts, strict=True))


def _heard(scores: Floats) -> Floats:
    """As a node sends them: no infinities."""
    return np.maximum(scores, MIN_LOGPROB)


def numbers(kind: Kind, checker: str, ends: NDArray[np.int64], columns: Columns) -> Floats | None:
    """The number of each sample of which something can be said. `checker`: the suffix of its columns. None when the
    record lacks them."""
    scored, before, lost = f"score_{checker}_v", f"score_{checker}_prev", f"margin_{checker}_v"
    needed = {Kind.STALE: (scored, before), Kind.DRAWN: (scored, lost), Kind.CLAIMS: (scored,)}[kind]
    if not set(needed) <= set(columns):
        return None
    found = []
    for claimed, scores, *other in _samples(ends, columns, ("claim", *needed)):
        opinion = Opinion.of(
            len(claimed),
            _heard(scores),
            _heard(other[0]) if kind is Kind.STALE else (),
            other[0] if kind is Kind.DRAWN else (),
        )
        found.append(author_numbers(claimed, opinion).get(kind))
    values = np.array([value for value in found if value is not None])
    return values if len(values) else None


def mismatches(checker: str, ends: NDArray[np.int64], columns: Columns) -> NDArray[np.bool_] | None:
    """Whether each sample differs from its replay. None when the record lacks it."""
    names = ("claim", f"score_{checker}_v", f"margin_{checker}_v")
    if not set(names) <= set(columns):
        return None
    found = [
        not is_alike(claimed, Opinion.of(len(claimed), _heard(scores), (), lost))
        for claimed, scores, lost in _samples(ends, columns, names)
    ]
    return np.array(found)


def proven_at_once(checker: str, ends: NDArray[np.int64], columns: Columns) -> NDArray[np.bool_] | None:
    """Whether each sample alone proves its node false, because its claims or its draws are beyond any rounding: see
    `node.ledger.trust.verifier`. None when the record lacks it."""
    scored, lost = f"score_{checker}_v", f"margin_{checker}_v"
    if scored not in columns:
        return None
    names = ("claim", scored, *((lost,) if lost in columns else ()))
    replayed = checker == "replay"
    return np.array([_is_proven(replayed, *sample) for sample in _samples(ends, columns, names)])


def _is_proven(replayed: bool, claimed: Floats, scores: Floats, lost: Floats | None = None) -> bool:
    opinion = Opinion.of(len(claimed), _heard(scores), (), () if lost is None else lost)
    if replayed and worst_token(claimed, opinion) >= TOKEN_AT_ONCE:
        return True
    few = max(1.0, (AT_ONCE_TOKENS / len(claimed)) ** 0.5)
    if difference(claimed, _heard(scores)) > Settings().check_tolerance * few:
        return True
    return lost is not None and len(lost) >= AT_ONCE_TOKENS and float(lost.mean()) >= AT_ONCE
