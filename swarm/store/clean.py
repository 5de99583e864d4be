"""What a process leaves when it has ended as it should: that the checkpoint on disk is the one it wrote and proved.

The record is the last thing written, and the first thing that the next process removes: one that was killed, or lost
its power, finds none and hashes all. It names the anchor's root, and size, time and inode of each of its files.
"""

import json
import os
from pathlib import Path

from swarm.store.anchors import Anchor
from swarm.store.disk import Disk

__all__ = ["Clean", "Left"]


class Clean:
    """The record in a store's folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._path = folder / "clean.json"
        self._disk = disk

    def leave(self, anchor: Anchor) -> None:
        """The bits of `anchor` are proven, and nobody writes here any more. Raises `DiskFull`."""
        self._disk.write_whole(self._path, json.dumps(_print(anchor)).encode())

    def take(self) -> "Left":
        """What the last process left. It counts once: the record is gone when this returns."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            found = None
        if self._path.exists():
            self._disk.remove(self._path)
            self._disk.sync_folder(self._path.parent)
        return Left(found)


class Left:
    """A record that was taken."""

    def __init__(self, found: object) -> None:
        self._found = found

    def vouches_for(self, anchor: Anchor) -> bool:
        """Whether the files of `anchor` are the very ones, untouched."""
        try:
            return anchor.trusted and self._found == _print(anchor)
        except OSError:
            return False


def _print(anchor: Anchor) -> dict[str, object]:
    files: dict[str, list[int]] = {}
    for path in sorted(anchor.folder.iterdir()):
        status = os.stat(path)
        files[path.name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    return {"root": anchor.root.hex(), "files": files}
