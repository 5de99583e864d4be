"""The checkpoints of the replica on disk, written every few versions, from which a restart replays the rest.

A checkpoint is a folder `EPOCH.VERSION` with checkpoint files and a marker, which holds the root and the size and
modification time of each file. A checkpoint whose files have not changed since is preferred; loading one hashes it
anyway, which costs no more than copying it. The marker is written last, before the folder is renamed to its name, so a
folder without a marker is unfinished.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.protocol.core.events import VersionId
from swarm.store.disk import TEMPORARY, Disk

__all__ = ["SavedCheckpoint", "SavedCheckpoints"]

_MARKER: Final = "anchor.json"


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk. `trusted`: its files have the sizes and modification times of the marker."""

    folder: Path
    version: VersionId
    root: bytes
    layout: bytes
    trusted: bool


class SavedCheckpoints:
    """The checkpoints under one folder."""

    def __init__(self, folder: Path, disk: Disk, keep: int = 1) -> None:
        """`keep`: how many of the newest checkpoints to keep."""
        self._folder = folder
        self._disk = disk
        self._keep = keep

    def write(self, version: VersionId, root: bytes, layout: bytes, fill: Callable[[Path], None]) -> None:
        """Write a checkpoint, then remove the oldest beyond `keep`. Durable on return. Raises `DiskFull`.

        `fill`: creates the folder that it is given, and writes the checkpoint to it.
        """
        place = self._folder / str(version)
        temporary = self._folder / (str(version) + TEMPORARY)
        self._disk.remove(temporary)
        with self._disk.errors(place):
            self._disk.before("write", temporary)
            fill(temporary)
            files = {}
            for path in sorted(temporary.iterdir()):
                self._disk.sync_file(path)
                status = path.stat()
                files[path.name] = [status.st_size, status.st_mtime_ns]
            marker = {"root": root.hex(), "layout": layout.hex(), "files": files}
            self._disk.write_whole(temporary / _MARKER, json.dumps(marker).encode())
            self._disk.sync_folder(temporary)
        self._disk.remove(place)
        self._disk.put_in_place(temporary, place)
        older = [saved for saved in self.list() if saved.version != version]
        for old in older[self._keep - 1 :]:
            self._disk.remove(old.folder)

    def list(self) -> list[SavedCheckpoint]:
        """The finished checkpoints, newest first."""
        found = [_read(path) for path in self._folder.iterdir() if not path.name.endswith(TEMPORARY)]
        return sorted((one for one in found if one is not None), key=lambda one: one.version, reverse=True)

    def remove(self, checkpoint: SavedCheckpoint) -> None:
        """Remove a checkpoint whose bits do not have the root of its marker."""
        self._disk.remove(checkpoint.folder)


def _read(folder: Path) -> SavedCheckpoint | None:
    """The checkpoint in `folder`; None if it is unfinished or its marker is damaged."""
    try:
        epoch, version = map(int, folder.name.split("."))
        marker = json.loads((folder / _MARKER).read_bytes())
        files = {str(name): (int(size), int(mtime)) for name, (size, mtime) in marker["files"].items()}
        root, layout = bytes.fromhex(marker["root"]), bytes.fromhex(marker["layout"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    trusted = all(_unchanged(folder / name, size, mtime) for name, (size, mtime) in files.items())
    return SavedCheckpoint(folder, VersionId(epoch, version), root, layout, trusted and len(root) == 32)


def _unchanged(path: Path, size: int, mtime_ns: int) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_size == size and status.st_mtime_ns == mtime_ns
