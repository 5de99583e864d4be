"""The replica's own file, where it is kept on disk instead of in memory.

    replica          the bits, mapped and written in place (`codec.replica`)
    replica.json     which layout they are of; after a clean end also which root, and the file's size and time

While a process has the file, the record names no root: so a start that finds one knows that nothing was written since,
and one that finds none hashes every block before it believes any.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from swarm.store.disk import Disk

__all__ = ["Kept", "Working"]


@dataclass(frozen=True, slots=True)
class Kept:
    """What a replica's file holds. `root`: None when the process that had it did not end cleanly."""

    layout: bytes
    root: bytes | None


class Working:
    """The file under a store's folder."""

    def __init__(self, folder: Path, disk: Disk) -> None:
        self.path = folder / "replica"
        self._record = folder / "replica.json"
        self._disk = disk

    def look(self) -> Kept | None:
        """What is there; None when there is nothing, or nothing that can be told."""
        try:
            found = json.loads(self._record.read_bytes())
            layout, root = bytes.fromhex(found["layout"]), found["root"]
            status = os.stat(self.path)
            if root is None or found["file"] != [status.st_size, status.st_mtime_ns]:
                return Kept(layout, None)
            return Kept(layout, bytes.fromhex(root))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def take(self, layout: bytes) -> None:
        """Before the file is made or written to: from here on only hashing tells what it holds. Raises `DiskFull`."""
        self._write({"layout": layout.hex(), "root": None})

    def leave(self, layout: bytes, root: bytes) -> None:
        """Nothing writes to it any more, and all of it is `root`. Raises `DiskFull`."""
        self._disk.sync_file(self.path)
        status = os.stat(self.path)
        self._write({"layout": layout.hex(), "root": root.hex(), "file": [status.st_size, status.st_mtime_ns]})

    def remove(self) -> None:
        """It is of no use: the replica is elsewhere, or of another model."""
        self._disk.remove(self._record)
        self._disk.remove(self.path)

    def _write(self, record: dict[str, object]) -> None:
        self._disk.write_whole(self._record, json.dumps(record).encode())
