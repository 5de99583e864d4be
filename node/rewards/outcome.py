"""What a reward function made of a sample: a finite number, or the reason why there is none. Pure.

Two outcomes are the same when their numbers have the same 64 bits, or when neither has a number.
"""

import math
import numbers
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

__all__ = ["MAX_WHY", "Outcome", "Reward", "evaluate", "outcome_of"]

MAX_WHY: Final = 200
"""Characters of a reason."""

Reward = Callable[[str, str, Mapping[str, Any]], float]
"""`reward(prompt, completion, metadata)`: a number. The same arguments must always give the same number."""


class Outcome(NamedTuple):
    """`value`: finite; None: there is none, and `why`. `lost`: it was this machine that could not compute it (the time
    was over, the process ended), so another may."""

    value: float | None
    why: str = ""
    lost: bool = False

    @property
    def bits(self) -> bytes:
        """What two outcomes of one sample are compared by."""
        return b"" if self.value is None else struct.pack("<d", self.value)

    @classmethod
    def without(cls, why: str, *, lost: bool = False) -> "Outcome":
        """An outcome without a number. `why` is shortened to one line of `MAX_WHY` characters."""
        line = " ".join(why[: 4 * MAX_WHY].split())
        return cls(None, "".join(c if c.isprintable() else "?" for c in line)[:MAX_WHY] or "it gave no reason", lost)


def outcome_of(returned: Any) -> Outcome:
    """The outcome of what a function returned: a real number (also numpy's), or a truth value as 1 or 0."""
    if hasattr(returned, "item") and not isinstance(returned, numbers.Real) and getattr(returned, "size", 0) == 1:
        returned = returned.item()  # an array or a truth value of numpy with one element
    if not isinstance(returned, numbers.Real):
        return Outcome.without(f"it returned a value of type {type(returned).__name__}, not a number")
    try:
        value = float(returned) + 0.0  # -0.0 becomes 0.0
    except OverflowError:
        value = math.inf
    return Outcome(value) if math.isfinite(value) else Outcome.without(f"it returned {value}, not a finite number")


def evaluate(function: Reward, prompt: str, completion: str, metadata: Mapping[str, Any]) -> Outcome:
    """The outcome of one call. Whatever the function raises becomes a reason. Python's random numbers begin anew, so
    that a function that draws some gives the same number everywhere."""
    random.seed(0)
    try:
        return outcome_of(function(prompt, completion, metadata))
    except MemoryError:
        return Outcome.without("it needs more memory than it may have", lost=True)
    except (Exception, SystemExit) as error:  # a function of the operator's may raise anything
        return Outcome.without(f"{type(error).__name__}: {_text(error)}")


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "its text cannot be read"
