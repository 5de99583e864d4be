"""The record of a clean exit, which lets the next start skip hashing the checkpoint.

A process that exits cleanly writes the record last: it says that the checkpoint on disk has been proven. The next
process removes it first. After a kill or a power failure there is no record, so the checkpoint is hashed. The record
holds the checkpoint's root, and the size, modification time and inode of each file.
"""

import json
import os
from pathlib import Path

from swarm.store.checkpoints import SavedCheckpoint
from swarm.store.disk import Disk

__all__ = ["Clean", "Left"]


class Clean:
    """Writes and reads the record in a store's folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self._path = folder / "clean.json"
        self._disk = disk

    def leave(self, checkpoint: SavedCheckpoint) -> None:
        """Record that the bits of `checkpoint` are proven. Call it after all other writes. Raises `DiskFull`."""
        self._disk.write_whole(self._path, json.dumps(_fingerprint(checkpoint)).encode())

    def take(self) -> "Left":
        """Read the record of the last process and remove it, durably, so that it is used only once."""
        try:
            found = json.loads(self._path.read_bytes())
        except (OSError, ValueError, RecursionError):
            found = None
        if self._path.exists():
            self._disk.remove(self._path)
            self._disk.sync_folder(self._path.parent)
        return Left(found)


class Left:
    """The record of the last process, or nothing if it did not exit cleanly."""

    def __init__(self, found: object) -> None:
        self._found = found

    def vouches_for(self, checkpoint: SavedCheckpoint) -> bool:
        """Whether the files of `checkpoint` are those of the record and have not changed."""
        try:
            return checkpoint.trusted and self._found == _fingerprint(checkpoint)
        except OSError:
            return False


def _fingerprint(checkpoint: SavedCheckpoint) -> dict[str, object]:
    files: dict[str, list[int]] = {}
    for path in sorted(checkpoint.marker.parent.iterdir()):
        status = os.stat(path)
        files[path.name] = [status.st_size, status.st_mtime_ns, status.st_ino]
    if checkpoint.reference is not None:  # trusted, so these are the files as they are
        files |= {name: list(numbers) for name, numbers in checkpoint.reference.files.items()}
    return {"root": checkpoint.root.hex(), "files": files}
