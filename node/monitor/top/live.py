"""The screen of `swarm-node top`: it is drawn again every second, at each key and at each change of its size.

Only lines that differ are written, in one write, so nothing flickers; the terminal's own screen comes back at the end.
"""

import io
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TextIO

import trio
from msgspec import UNSET
from rich.console import Console
from rich.text import Text

from node.monitor.monitor import Monitor, Seen
from node.monitor.top.draw import Picture, draw
from node.status.keys import pressed_keys
from node.status.schema import SeedStatus

__all__ = ["Screen", "show"]

LOOK_EVERY_S: Final = 1.0
SIZE_EVERY_S: Final = 0.1
"""How soon a change of the terminal's size is seen."""
RATES: Final = 200
"""Looks of which the tokens/s are kept: the widest sparkline."""
_BEGIN: Final = "\x1b[?1049h\x1b[?25l"
"""The other screen, without a cursor."""
_END: Final = "\x1b[?25h\x1b[?1049l"
_SYNC: Final = ("\x1b[?2026h", "\x1b[?2026l")
"""Around a frame: a terminal that knows this shows it at once; others ignore it."""


class Screen:
    """Writes frames to a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._console = Console(file=io.StringIO(), force_terminal=True, highlight=False, markup=False, soft_wrap=True)
        self._shown: list[str] = []

    def show(self, lines: list[Text], *, anew: bool = False) -> None:
        """Show these lines. `anew`: all of them, after the screen was cleared."""
        fresh = [self._coded(line) for line in lines]
        changes = [] if not anew else ["\x1b[2J"]
        for index, line in enumerate(fresh):
            if anew or index >= len(self._shown) or self._shown[index] != line:
                changes.append(f"\x1b[{index + 1};1H{line}")
        self._shown = fresh
        if changes:
            self._out.write(_SYNC[0] + "".join(changes) + _SYNC[1])
            self._out.flush()

    def _coded(self, line: Text) -> str:
        """The line with its colours as sequences of this terminal."""
        with self._console.capture() as capture:
            self._console.print(line, end="")
        return capture.get()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Use the terminal's other screen meanwhile."""
        self._out.write(_BEGIN)
        try:
            yield
        finally:
            self._out.write(_END)
            self._out.flush()


class _Top:
    def __init__(self, monitor: Monitor, screen: Screen, first: Seen) -> None:
        self._monitor, self._screen, self._seen = monitor, screen, first
        self._rates: deque[float] = deque(maxlen=RATES)
        self._scroll = self._stripe = 0
        self._size = os.terminal_size((0, 0))

    def draw(self) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        picture = Picture(
            self._seen,
            size.columns,
            size.lines,
            time.strftime("%H:%M:%S"),
            tuple(self._rates),
            self._scroll,
            self._stripe,
        )
        anew, self._size = size != self._size, size
        self._screen.show(draw(picture), anew=anew)

    async def look(self) -> None:
        while True:
            self._seen = await self._monitor.look()
            if (rate := _tokens_s(self._seen)) is not None:
                self._rates.append(rate)
            self.draw()
            await trio.sleep(LOOK_EVERY_S)

    async def watch_size(self) -> None:
        while True:
            await trio.sleep(SIZE_EVERY_S)
            if os.get_terminal_size(sys.stdout.fileno()) != self._size:
                self.draw()

    async def keys(self) -> None:
        """Returns when q is pressed, or no key can come any more."""
        async for key in pressed_keys():
            match key:
                case "q" | "Q":
                    return
                case "up" | "k":
                    self._scroll = max(0, self._scroll - 1)
                case "down" | "j":
                    self._scroll = min(self._most_scroll, self._scroll + 1)
                case "page up":
                    self._scroll = max(0, self._scroll - 10)
                case "page down":
                    self._scroll = min(self._most_scroll, self._scroll + 10)
                case "left":
                    self._stripe -= 1
                case "right":
                    self._stripe += 1
                case _:
                    continue
            self.draw()

    @property
    def _most_scroll(self) -> int:
        return max(0, len(self._seen.status.nodes) - 1) if self._seen.status is not None else 0


def _tokens_s(seen: Seen) -> float | None:
    if seen.status is None or seen.away:
        return None
    if isinstance(seen.status, SeedStatus):
        return seen.status.work.tokens_per_s
    rate = seen.status.nodes[0].tokens_s if seen.status.nodes else UNSET
    return None if rate is UNSET else rate


async def show(monitor: Monitor, first: Seen) -> None:
    """Show what `monitor` sees until q is pressed or this is cancelled. Both ends must be a terminal."""
    screen = Screen(sys.stdout)
    top = _Top(monitor, screen, first)
    with screen.used():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(top.look)
            nursery.start_soon(top.watch_size)
            await top.keys()
            nursery.cancel_scope.cancel()
