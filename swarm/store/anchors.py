"""Anchors: loadable checkpoints of the replica on disk, one every few versions.

An anchor is a folder `EPOCH.VERSION` with checkpoint files and a marker that names the root and each file's size and
modification time. An anchor whose files still have both is preferred; whoever loads one hashes it all the same, which
costs no more than copying it. The marker is the last thing written before the folder is renamed into place, so a
folder without one was never finished.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.protocol.core.events import VersionId
from swarm.store.disk import TEMPORARY, Disk

__all__ = ["Anchor", "Anchors"]

_MARKER: Final = "anchor.json"


@dataclass(frozen=True, slots=True)
class Anchor:
    """A checkpoint on disk. `trusted`: its files look as they were written."""

    folder: Path
    version: VersionId
    root: bytes
    layout: bytes
    trusted: bool


class Anchors:
    """The anchors under one folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self.keep = 1
        """How many of the newest stay; a seed keeps two, so that it can always go back some versions."""

    def write(self, version: VersionId, root: bytes, layout: bytes, fill: Callable[[Path], None]) -> None:
        """Make an anchor of what `fill` writes to the new folder that it is given. Durable on return; older ones go.

        Raises `DiskFull`.
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
        older = [anchor for anchor in self.list() if anchor.version != version]
        for old in older[self.keep - 1 :]:
            self._disk.remove(old.folder)

    def list(self) -> list[Anchor]:
        """The finished ones, newest first."""
        found = [_read(path) for path in self._folder.iterdir() if not path.name.endswith(TEMPORARY)]
        return sorted((anchor for anchor in found if anchor is not None), key=lambda a: a.version, reverse=True)

    def remove(self, anchor: Anchor) -> None:
        """Its bits turned out not to be what its marker says."""
        self._disk.remove(anchor.folder)


def _read(folder: Path) -> Anchor | None:
    try:
        epoch, version = map(int, folder.name.split("."))
        marker = json.loads((folder / _MARKER).read_bytes())
        files = {str(name): (int(size), int(mtime)) for name, (size, mtime) in marker["files"].items()}
        root, layout = bytes.fromhex(marker["root"]), bytes.fromhex(marker["layout"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    trusted = all(_unchanged(folder / name, size, mtime) for name, (size, mtime) in files.items())
    return Anchor(folder, VersionId(epoch, version), root, layout, trusted and len(root) == 32)


def _unchanged(path: Path, size: int, mtime_ns: int) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_size == size and status.st_mtime_ns == mtime_ns
