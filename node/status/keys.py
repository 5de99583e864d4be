"""Keys as they are pressed, for a live view."""

import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator

import trio

__all__ = ["pressed_keys"]


async def pressed_keys() -> AsyncIterator[str]:
    """Each key, without waiting for Enter; ends at once where stdin is no terminal.

    The terminal's mode is restored when the iterator is closed.
    """
    if not sys.stdin.isatty():
        return
    descriptor = sys.stdin.fileno()
    mode = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        while True:
            await trio.lowlevel.wait_readable(descriptor)
            for key in os.read(descriptor, 64).decode(errors="ignore"):
                yield key
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
