"""What replays of one sample say of its author and of its checkers: mismatches, bit for bit.

A *replay* computes the claimed tokens as they were drawn (`node.engines.judgement.Claim.replay`). In one arithmetic
class it has the author's bits. So one log-probability with other bits, or one token that is not the winner of the
leased noise, is a *mismatch*.

The first opinion decides if it is alike. Otherwise everybody in the panel is asked, and the *panel's bits* decide:
those on which more of its P nodes agree than may lie (`dropped`), so that one of them is honest. The author has a
mismatch if its claims differ from them, and so has each checker whose opinion does. Without such bits the sample is
*undecided*.

Liars alone therefore never make a mismatch of an honest node whose bits are those of the honest nodes: `dropped(P)` of
them are too few for the panel's bits, and with one honest node among them the bits are the honest ones. What they can
do is to leave a sample undecided, by other opinions or by none. That is no mismatch of the author's, and
`node.verification.mismatches` counts it so that they gain nothing by it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from node.verification.evidence import dropped
from node.verification.opinions import Opinion

__all__ = ["Weighed", "all_alike", "is_alike", "weigh"]


@dataclass(frozen=True, slots=True)
class Weighed:
    """The mismatches of one sample: True, False, or None where it is undecided."""

    author: bool | None
    checkers: dict[bytes, bool | None] = field(default_factory=dict)
    """Of those that answered; empty where only one did."""


def _bits(values: ArrayLike) -> bytes:
    """As float32; a zero has no sign, because minus nothing is the logarithm of 1, too."""
    return (np.asarray(values, "<f4") + np.float32(0.0)).tobytes()


def _opinion_bits(opinion: Opinion) -> tuple[bytes, bytes]:
    return _bits(opinion.scores), b"" if opinion.margins is None else _bits(opinion.margins)


def is_alike(claimed: ArrayLike, opinion: Opinion) -> bool:
    """Whether every claimed log-probability has the bits of the checker's, and every token wins its draw."""
    wins = opinion.margins is None or not opinion.margins.any()
    return wins and _bits(claimed) == _bits(opinion.scores)


def all_alike(claimed: ArrayLike, opinions: Mapping[bytes, Opinion]) -> bool:
    """Whether no opinion differs from the claims, so that nobody else has to be asked."""
    return all(is_alike(claimed, opinion) for opinion in opinions.values())


def weigh(claimed: ArrayLike, opinions: Mapping[bytes, Opinion], panel: int) -> Weighed:
    """`opinions`: of a panel of so many nodes, at least one. Where one of them is unlike the claims, all that answered
    in time."""
    if all_alike(claimed, opinions):
        return Weighed(False, dict.fromkeys(opinions, False) if len(opinions) > 1 else {})
    found = {checker: _opinion_bits(opinion) for checker, opinion in opinions.items()}
    (bits, count), *_ = Counter(found.values()).most_common(1)
    if count <= dropped(panel):
        return Weighed(None, dict.fromkeys(opinions, None) if len(opinions) > 1 else {})
    theirs = next(opinion for checker, opinion in opinions.items() if found[checker] == bits)
    return Weighed(not is_alike(claimed, theirs), {checker: own != bits for checker, own in found.items()})
