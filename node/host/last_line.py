"""The last line of a process's log, for the error that says why the process ended."""

import os
from pathlib import Path
from typing import Final

__all__ = ["last_line"]

LAST_LINE_BYTES: Final = 4096
"""Bytes at the end of a log in which its last line is looked for."""


def last_line(log: Path, start: int = 0) -> str:
    """The last line of `log` that is not empty, of what was written from byte `start` on; empty if there is none."""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - LAST_LINE_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
    written = [line.strip() for line in lines if line.strip()]
    return written[-1] if written else ""
