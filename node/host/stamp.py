"""The files of a folder as they are: what tells whether a checkpoint was written to since somebody looked."""

import os
from pathlib import Path

__all__ = ["Stamp", "stamp"]

Stamp = tuple[tuple[str, int, int], ...]
"""The files of a folder, by name: (name, bytes, time of the last change in ns) of each."""


def stamp(folder: Path) -> Stamp:
    """The files directly in `folder`; of a file, the file itself. Raises `OSError`."""
    if folder.is_file():
        info = folder.stat()
        return ((folder.name, info.st_size, info.st_mtime_ns),)
    with os.scandir(folder) as entries:
        files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, info.st_size, info.st_mtime_ns) for name, info in files))
