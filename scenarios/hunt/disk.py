"""A machine's disk: a real folder, of which it is known what a power failure would leave.

Data is durable once its file was synced, and a name once its folder was. Everything else may be lost at a power
failure, may have reached the disk out of order, or in part. `PowerCut` decides for each page and each name, from the
last synced state and the present one. The folder should be on a file system in memory (/dev/shm): nothing there is ever
synced for real.
"""

import errno
import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from swarm.store.disk import Disk

__all__ = ["FaultyDisk", "VirtualDisk"]

PAGE: Final = 4096
SECTOR: Final = 512
"""A disk writes a sector whole; a page, that is eight sectors, may be torn."""
CUTS: Final = ("nothing", "all", "some")
"""What of the unsynced writes reaches the disk at a power failure."""


class _Content(NamedTuple):
    """A file's bytes, and the time of its last change in ns."""

    data: bytes
    changed_ns: int


_Image = dict[str, "_Content | _Image"]
"""What a folder holds, by name."""


@dataclass(eq=False)
class VirtualDisk:
    """The disk under one folder. All numbers are inodes."""

    folder: Path
    step: Callable[[str, str], None] = lambda moment, name: None
    """Called before and after each step, with `before disk:sync` or the like and the file's name. It may raise."""
    full: bool = False
    lies: bool = False
    """A sync returns, and nothing is durable."""
    syncs: int = 0
    _files: dict[int, _Content] = field(default_factory=dict)
    """By inode of a file: its durable bytes."""
    _names: dict[int, dict[str, tuple[int, bool]]] = field(default_factory=dict)
    """By inode of a folder: its durable names, each with its inode and whether that is a folder."""

    def holds(self, path: Path) -> bool:
        return path == self.folder or self.folder in path.parents

    def synced(self, path: Path) -> None:
        """The file or folder was synced."""
        if self.lies:
            return
        self.syncs += 1
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = _names_in(path)
        else:
            self._files[status.st_ino] = _Content(path.read_bytes(), status.st_mtime_ns)

    def synced_database(self, path: Path) -> None:
        """SQLite synced a file. When it makes a journal it also syncs the folder, which its VFS does not show."""
        if self.lies or not path.exists():
            return
        if path.stat().st_ino not in self._files:
            self.synced(path.parent)
        self.synced(path)

    def settle(self) -> None:
        """Everything is durable as it is now."""
        self._files.clear()
        self._names.clear()
        for folder, _, names in os.walk(self.folder):
            self._names[os.stat(folder).st_ino] = _names_in(Path(folder))
            for name in names:
                path = Path(folder) / name
                if path.is_file():
                    self._files[path.stat().st_ino] = _Content(path.read_bytes(), path.stat().st_mtime_ns)

    def cut_power(self, rng: random.Random) -> None:
        """The machine lost its power: leave what was durable, and of the rest what happened to be written."""
        image = self._after(self.folder, rng, rng.choice(CUTS))
        shutil.rmtree(self.folder)
        _write(self.folder, image)
        self.settle()

    def copy_after_cut(self, rng: random.Random, to: Path) -> None:
        """Write to a new folder `to` what a power failure now would leave. This disk stays as it is."""
        _write(to, self._after(self.folder, rng, rng.choice(CUTS)))

    def clear(self) -> None:
        """The machine's owner removes everything."""
        shutil.rmtree(self.folder)
        self.folder.mkdir(mode=0o700)
        self.settle()

    def rot(self, rng: random.Random) -> str:
        """Flip a bit of a file. Returns its name; empty: there is no file."""
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file() and path.stat().st_size)
        if not paths:
            return ""
        path = rng.choice(paths)
        changed = path.stat().st_mtime_ns
        with open(path, "r+b") as file:
            at = rng.randrange(path.stat().st_size)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        os.utime(path, ns=(changed, changed))
        return path.name

    # ------------------------------------------------------------ after a power failure

    def _after(self, folder: Path, rng: random.Random, how: str) -> _Image:
        now = _names_in(folder)
        durable = self._names.get(folder.stat().st_ino, {})
        image: _Image = {}
        for name in sorted(now.keys() | durable.keys()):
            old, new = durable.get(name), now.get(name)
            chosen = new if old == new or how == "all" or (how == "some" and rng.random() < 0.5) else old
            if chosen is None:
                continue
            inode, is_folder = chosen
            if chosen == new:
                path = folder / name
                image[name] = self._after(path, rng, how) if is_folder else self._mixed(path, inode, rng, how)
            else:
                image[name] = self._removed(inode, is_folder)
        return image

    def _removed(self, inode: int, is_folder: bool) -> "_Content | _Image":
        """What is durable of a file or folder whose removal was not."""
        if not is_folder:
            return self._files.get(inode, _Content(b"", 0))
        return {name: self._removed(*inner) for name, inner in self._names.get(inode, {}).items()}

    def _mixed(self, path: Path, inode: int, rng: random.Random, how: str) -> _Content:
        status = path.stat()
        new = _Content(path.read_bytes(), status.st_mtime_ns)
        old = self._files.get(inode, _Content(b"", new.changed_ns))
        if how == "all" or old.data == new.data:
            return new
        if how == "nothing":
            return old
        size = rng.choice((len(old.data), len(new.data)))
        before, after = (data[:size].ljust(size, b"\0") for data in (old.data, new.data))
        data = bytearray(before)
        for at in range(0, size, PAGE):
            if before[at : at + PAGE] == after[at : at + PAGE]:
                continue
            fate = rng.random()
            if fate < 0.4:
                data[at : at + PAGE] = after[at : at + PAGE]
            elif fate < 0.6:  # torn
                cut = at + SECTOR * rng.randrange(1, PAGE // SECTOR)
                data[at:cut] = after[at:cut]
        return _Content(bytes(data), rng.choice((old, new)).changed_ns)


class FaultyDisk(Disk):
    """The store's `Disk` on a virtual one: each step asks first, and may fail."""

    def __init__(self, under: VirtualDisk) -> None:
        super().__init__(self._before)
        self._under = under

    def _before(self, step: str, path: Path) -> None:
        self._under.step(f"before disk:{step}", path.name)
        if self._under.full and step in ("write", "commit"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _names_in(folder: Path) -> dict[str, tuple[int, bool]]:
    """The files and folders in a folder; sockets are none."""
    found: dict[str, tuple[int, bool]] = {}
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False):
            found[entry.name] = entry.inode(), entry.is_dir(follow_symlinks=False)
    return found


def _write(folder: Path, image: _Image) -> None:
    folder.mkdir(mode=0o700)
    for name, what in image.items():
        if isinstance(what, dict):
            _write(folder / name, what)
        else:
            path = folder / name
            path.write_bytes(what.data)
            path.chmod(0o600)
            os.utime(path, ns=(what.changed_ns, what.changed_ns))
