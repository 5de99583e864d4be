"""One line on stderr for work that takes longer than two seconds."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Final, TextIO

__all__ = ["ProgressLine"]

QUIET_S: Final = 2.0
"""Nothing is shown for shorter work: a person waits this long without wondering."""
TICK_S: Final = 0.2
"""Interval at which the thread looks whether a line is due."""
LONGEST_PAUSE_S: Final = 30.0
"""Longest interval between two lines where stderr is no terminal; a log of hours stays readable."""


class ProgressLine:
    """`with Progress("Reading OLD", total=291, unit="tensors") as progress: ... progress.update(17)`.

    Silent for `QUIET_S`. Then, on a terminal, one line that is rewritten and erased at the end; elsewhere a line after
    2, 4, 8... seconds. A thread of its own writes the line, so work that never calls `update` shows up too; `update`
    and `label` may be used from any thread.
    """

    def __init__(
        self,
        label: str,
        total: float | None = None,
        unit: str = "",
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0.0
        self._stream = stream if stream is not None else sys.stderr
        self._live = self._stream.isatty()
        self._clock = clock
        self._started_at = clock()
        self._next_at = self._started_at + QUIET_S
        self._shown = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def update(self, done: float, total: float | None = None) -> None:
        """`done` units are done. `total`: pass it here if it was not known at the start."""
        self.done = done
        if total is not None:
            self.total = total

    def tick(self) -> None:
        """Write the line if it is due. Called by the thread, and by tests."""
        now = self._clock()
        if now < self._next_at:
            return
        line = self.line(now - self._started_at)
        if self._live:
            self._stream.write(f"\r\x1b[2K{line}")
        else:
            self._stream.write(line + "\n")
            self._next_at = now + min(now - self._started_at, LONGEST_PAUSE_S)
        self._stream.flush()
        self._shown = True

    def line(self, elapsed_s: float) -> str:
        """The text at `elapsed_s` seconds after the start."""
        if self.total:
            share = f"{self.done:,.0f} of {self.total:,.0f} {self.unit}".rstrip()
            return f"{self.label}: {share} ({100 * min(1.0, self.done / self.total):.0f} %), {elapsed_s:.0f} s"
        if self.done:
            return f"{self.label}: {self.done:,.0f} {self.unit}".rstrip() + f", {elapsed_s:.0f} s"
        return f"{self.label}: {elapsed_s:.0f} s"

    def _watch(self) -> None:
        while not self._stop.wait(TICK_S):
            self.tick()

    def __enter__(self) -> "ProgressLine":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._shown and self._live:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
