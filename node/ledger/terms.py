"""What a session asks of its request groups beyond their samples: when they may be partial, and who comes first."""

from typing import Annotated, Final

import msgspec

__all__ = ["MAX_PRIORITY", "PLAIN", "Terms"]

MAX_PRIORITY: Final = 8
"""Priorities are from -8 to 8."""


class Terms(msgspec.Struct, frozen=True, omit_defaults=True):
    """The default asks for nothing.

    `partial_s`: this long after its offer, a group is complete with the samples that it has then, or as soon as it has
    `least`; the others are no longer wanted. `priority`: groups of a higher one are given out first. `from_trained`:
    lags are counted from the version that the trainer's weights are at (`Head.trained`), published or not. `evaluates`:
    the samples are for an evaluation, which no pace of training limits, and are counted apart. `arbitrates`: the
    trainer computes rewards itself, so it gets samples, marked, about whose reward nodes disagree.
    """

    partial_s: Annotated[float, msgspec.Meta(gt=0, le=1e7)] | None = None
    least: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    priority: Annotated[int, msgspec.Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    from_trained: bool = False
    evaluates: bool = False
    arbitrates: bool = False


PLAIN: Final = Terms()
