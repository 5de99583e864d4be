"""Where the replica goes: in memory, on disk, or nowhere, by what this machine (or container) really has.

A container sees the whole machine's memory in /proc; what it may take stands in its control group.
"""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

from codec.errors import UsageError

__all__ = ["ReplicaPlace", "disk_free_bytes", "free_bytes", "give_back_promptly", "keep_on_disk"]

ReplicaPlace = Literal["auto", "ram", "disk", "none"]

_SPARE_BYTES: Final = 1 << 30
"""For all else: the process, scratch for coding (140 MB a thread), what is staged of a version (3 % of the model)."""
_MARGIN: Final = 1.1
_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD: Final = -1
_ARENA_MAX: Final = -8
"""Names of three settings in glibc's malloc.h."""
_MAPPED_FROM: Final = 1 << 20
"""Bytes. Below it the heap serves, as before; a request body or a chunk above it goes back when it is freed."""
_HEAPS: Final = 2
"""For all threads. glibc would give each thread one of its own, and what one frees, the others cannot use: ten members
that flooded a seed had it keep 20 MiB more."""
_NO_LIMIT: Final = 1 << 60
"""Control groups of version 1 write a number near 2^63 for no limit."""


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that can still be taken: the machine's, or less if a control group above this process says so.

    Page cache that can be given up counts as free. `root`: where /proc and /sys are. None where neither tells.
    """
    found = [value for value in (_machine(root), *_groups(root)) if value is not None]
    return min(found, default=None)


def disk_free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is, or is going to be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def keep_on_disk(place: ReplicaPlace, model_bytes: int, memory_bytes: int | None, disk_bytes: int) -> bool:
    """Whether the replica is to be on disk. What is asked for is done; "auto" takes memory where there is enough of it.

    In memory a version is written in milliseconds and read for nothing. On disk (`codec.layered`) a version is not
    written at all, and each block that is read is read from the disk and brought forward by up to eight versions.
    Raises `UsageError` when neither has room.
    """
    if place != "auto":
        return place == "disk"
    if memory_bytes is None or model_bytes * _MARGIN + _SPARE_BYTES <= memory_bytes:
        return False
    if model_bytes * _MARGIN <= disk_bytes:
        return True
    raise UsageError(
        f"the model takes {model_bytes / 1e9:.1f} GB, and there are only {memory_bytes / 1e9:.1f} GB of memory and "
        f"{disk_bytes / 1e9:.1f} GB of disk left. To pass chunks on without holding it, run swarm-node relay with the "
        "same ticket"
    )


def give_back_promptly(libc: str | None = None) -> bool:
    """Have this process return large blocks to the system as soon as they are freed. False: its libc has no such
    setting (musl needs none, others keep what they do). Call it once, before the process does its work.

    glibc maps large blocks apart, but moves the border up to 32 MiB once one of them was freed. From then on they come
    from the heap, which shrinks only from its end: a hundred request bodies at once stayed in the process for ever.
    Setting the border turns that off. A block mapped apart costs a page fault for every 4 KiB, some 0.2 ms for 1 MiB.
    Threads share `_HEAPS` heaps.
    """
    try:
        mallopt = ctypes.CDLL(libc).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    wanted = ((_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _MAPPED_FROM), (_ARENA_MAX, _HEAPS))
    return all(mallopt(name, value) for name, value in wanted)


def _machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> Iterator[int | None]:
    """What each control group above this process leaves."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            names = ("memory.max", "memory.current", ("inactive_file", "active_file"))
            yield from _up(root / "sys/fs/cgroup", path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
            yield from _up(root / "sys/fs/cgroup/memory", path, *names)


def _up(mount: Path, path: str, limit: str, usage: str, cache: tuple[str, ...]) -> Iterator[int | None]:
    """From the group at `path` up to the mount; in a container that sees only its own, the mount is that group."""
    folder = mount / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(mount):
            return
        yield _left(group, limit, usage, cache)


def _left(group: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    most, used = _number(group / limit), _number(group / usage)
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    stat = dict(line.split(maxsplit=1) for line in _lines(group / "memory.stat") if " " in line)
    return max(0, most - used + sum(int(stat.get(name, 0)) for name in cache))


def _number(path: Path) -> int | None:
    """None for "max", and where there is no such file."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
