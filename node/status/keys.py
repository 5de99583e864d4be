"""Keys as they are pressed, for a live view; nothing where there is no terminal."""

import contextlib
import os
import sys
import termios
import tty
from collections.abc import AsyncIterator

import trio

__all__ = ["pressed"]


async def pressed() -> AsyncIterator[str]:
    """Each key, without waiting for Enter. The terminal is put back as it was when the iterator is closed."""
    if not sys.stdin.isatty():
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        while True:
            await trio.lowlevel.wait_readable(descriptor)
            for key in os.read(descriptor, 64).decode(errors="ignore"):
                yield key
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
