"""Keys as they are pressed, for a live view."""

import contextlib
import os
import re
import sys
import termios
import tty
from collections.abc import AsyncIterator
from typing import Final

import trio

__all__ = ["pressed_keys", "split_keys"]

_NAMED: Final = {"A": "up", "B": "down", "C": "right", "D": "left", "5~": "page up", "6~": "page down"}
"""What a terminal sends after ESC [ or ESC O."""


def split_keys(text: str) -> list[str]:
    """The keys in what a terminal sent: characters, and names for the arrows. Other special keys are left out."""
    keys = []
    for sequence, letter in re.findall(r"\x1b[\[O]([0-9;]*[A-Za-z~])|(.)", text, re.DOTALL):
        if letter:
            keys.append(letter)
        elif sequence in _NAMED:
            keys.append(_NAMED[sequence])
    return keys


async def pressed_keys() -> AsyncIterator[str]:
    """Each key (see `split_keys`), without waiting for Enter; ends at once where stdin is no terminal.

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
            for key in split_keys(os.read(descriptor, 64).decode(errors="ignore")):
                yield key
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(descriptor, termios.TCSADRAIN, mode)
