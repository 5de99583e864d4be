"""Rests of a thread that works while another one generates."""

import time

__all__ = ["Pace"]

_WORK_S = 0.001
"""Seconds of work after which the thread rests."""
_RESTS = 3.0
"""Rest, as a multiple of the work before it: the thread gets a quarter of the time. It slows generation down."""


class Pace:
    """Rests after each piece of work, `_RESTS` times as long as it took.

    The generating thread needs the interpreter between any two kernels, so without rests a step would last as long as
    all the work that falls into it.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def rest(self) -> None:
        worked_s = time.perf_counter() - self._since
        if worked_s >= _WORK_S:
            time.sleep(_RESTS * worked_s)
            self._since = time.perf_counter()
