"""The checkpoints of the replica on disk, written every few versions, from which a restart replays the rest.

A checkpoint is a folder `EPOCH.VERSION` with checkpoint files and a marker, which holds the root and the size and
modification time of each file. A checkpoint whose files have not changed since is preferred; loading one hashes it
anyway, which costs no more than copying it. The marker is written last, before the folder is renamed to its name, so a
folder without a marker is unfinished.

A checkpoint may also be only a marker, which refers to the user's own folder (`Reference`): the bits of the base model
are not copied. Nothing in that folder is ever written or removed.
"""

import json
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm.protocol.core.events import VersionId
from swarm.store.disk import TEMPORARY, Disk

__all__ = ["Reference", "SavedCheckpoint", "SavedCheckpoints"]

_MARKER: Final = "anchor.json"


@dataclass(frozen=True, slots=True)
class Reference:
    """A folder or file of the user, by the size, modification time (ns) and inode of each file that holds weights."""

    folder: Path
    files: dict[str, tuple[int, int, int]]
    """By absolute path."""

    @classmethod
    def of(cls, folder: Path, weight_files: Iterable[Path]) -> "Reference | None":
        """The files as they are now. None unless all are regular files."""
        files = {}
        try:
            for path in weight_files:
                status = os.stat(path)
                if not stat.S_ISREG(status.st_mode):
                    return None
                files[str(path.absolute())] = (status.st_size, status.st_mtime_ns, status.st_ino)
        except OSError:
            return None
        return cls(folder.absolute(), files)

    @property
    def unchanged(self) -> bool:
        """Whether the files are still those that they were."""
        now = Reference.of(self.folder, map(Path, self.files))
        return now is not None and now.files == self.files


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint on disk. `trusted`: its files are as the marker lists them."""

    folder: Path
    """Where the weights are: in the store, or the user's folder."""
    version: VersionId
    root: bytes
    layout: bytes
    trusted: bool
    marker: Path
    """The marker, in the store's folder of this checkpoint."""
    reference: Reference | None = None
    """Set when the weights are in the user's folder."""


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
        temporary = self._temporary(version)
        with self._disk.errors(temporary):
            self._disk.before("write", temporary)
            fill(temporary)
        self._finish(temporary, version, root, layout)

    def adopt(self, folder: Path, version: VersionId, root: bytes, layout: bytes) -> None:
        """As `write`, with a folder of checkpoint files on the same disk, which is renamed."""
        self._finish(folder, version, root, layout)

    def refer(self, reference: Reference, version: VersionId, root: bytes, layout: bytes) -> None:
        """As `write`, but nothing is copied: the bits are in the user's folder, and were proven since `reference` was
        taken."""
        temporary = self._temporary(version)
        with self._disk.errors(temporary):
            temporary.mkdir(mode=0o700)
            marker = {"root": root.hex(), "layout": layout.hex(), "at": str(reference.folder), "files": reference.files}
            self._disk.write_whole(temporary / _MARKER, json.dumps(marker).encode())
        self._put_in_place(temporary, version)

    def _temporary(self, version: VersionId) -> Path:
        temporary = self._folder / (str(version) + TEMPORARY)
        self._disk.remove(temporary)
        return temporary

    def _finish(self, folder: Path, version: VersionId, root: bytes, layout: bytes) -> None:
        """Make the files in `folder` durable, write the marker beside them, and put them in place."""
        with self._disk.errors(folder):
            files = {}
            for path in sorted(path for path in folder.iterdir() if path.name != _MARKER):
                self._disk.sync_file(path)
                status = path.stat()
                files[path.name] = [status.st_size, status.st_mtime_ns]
            marker = {"root": root.hex(), "layout": layout.hex(), "files": files}
            self._disk.write_whole(folder / _MARKER, json.dumps(marker).encode())
            self._disk.sync_folder(folder)
        self._put_in_place(folder, version)

    def _put_in_place(self, folder: Path, version: VersionId) -> None:
        place = self._folder / str(version)
        self._disk.remove(place)
        self._disk.put_in_place(folder, place)
        older = [saved for saved in self.list() if saved.version != version]
        for old in older[self._keep - 1 :]:
            self.remove(old)

    def list(self) -> list[SavedCheckpoint]:
        """The finished checkpoints, newest first."""
        found = [_read(path) for path in self._folder.iterdir() if not path.name.endswith(TEMPORARY)]
        return sorted((one for one in found if one is not None), key=lambda one: one.version, reverse=True)

    @property
    def changed_folder(self) -> Path | None:
        """The user's folder, if the newest checkpoint refers to one that was changed or removed since."""
        newest = next(iter(self.list()), None)
        return newest.folder if newest is not None and newest.reference and not newest.trusted else None

    def remove(self, checkpoint: SavedCheckpoint) -> None:
        """Remove a checkpoint; of one that refers to the user's folder, only the marker."""
        self._disk.remove(checkpoint.marker.parent)


def _read(folder: Path) -> SavedCheckpoint | None:
    """The checkpoint in `folder`; None if it is unfinished or its marker is damaged."""
    path = folder / _MARKER
    try:
        epoch, version = map(int, folder.name.split("."))
        marker = json.loads(path.read_bytes())
        root, layout = bytes.fromhex(marker["root"]), bytes.fromhex(marker["layout"])
        place, reference = folder, None
        if "at" in marker:
            place = Path(marker["at"])
            fields = {str(name): tuple(map(int, numbers)) for name, numbers in marker["files"].items()}
            reference = Reference(place, {name: (size, time, inode) for name, (size, time, inode) in fields.items()})
            trusted = reference.unchanged
        else:
            files = {str(name): (int(size), int(mtime)) for name, (size, mtime) in marker["files"].items()}
            trusted = all(_unchanged(folder / name, size, mtime) for name, (size, mtime) in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return SavedCheckpoint(place, VersionId(epoch, version), root, layout, trusted and len(root) == 32, path, reference)


def _unchanged(path: Path, size: int, mtime_ns: int) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_size == size and status.st_mtime_ns == mtime_ns
