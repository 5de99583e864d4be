"""What memory this machine (or container) really has left, and how malloc gives it back.

A container sees the whole machine's memory in /proc; the memory that it may use is in its control group.
"""

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from node.settings.groups import control_groups, lines_of, number_in

__all__ = ["disk_free_bytes", "free_bytes", "give_back_promptly", "used_bytes"]

_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD: Final = -1
_ARENA_MAX: Final = -8
"""Three parameters of mallopt(3), with their numbers in glibc's malloc.h."""
_MAPPED_FROM: Final = 4 << 20
"""Bytes. Smaller blocks (a piece, a chunk, a block of a bf16 model) come from the heap, whose pages are used
again; a larger one, such as a request body, goes back to the system when it is freed."""
_KEPT_FREE: Final = 16 << 20
"""Bytes that a heap may keep at its end. With less, each chunk's pages go back to the system and fault in again for the
next chunk."""
_HEAPS: Final = 2
"""Heaps shared by all threads. glibc would give each thread its own, and no thread can use what another has freed: ten
members that flooded a seed made it keep 20 MiB more."""
_NO_LIMIT: Final = 1 << 60
"""Control groups of version 1 report a number near 2^63 when there is no limit."""


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process can still use: the machine's, or less if a control group limits it.

    Reclaimable page cache counts as free. `root`: where /proc and /sys are. None when neither says.
    """
    found = [value for value in (_machine(root), *_groups(root)) if value is not None]
    return min(found, default=None)


def disk_free_bytes(folder: Path) -> int:
    """Free bytes of the file system on which `folder` is or would be."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def used_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process uses and the system cannot take back: private and shared, without files."""
    fields = dict(line.split(":", 1) for line in lines_of(root / "proc/self/status") if ":" in line)
    return sum(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem") if name in fields)


def give_back_promptly(libc: str | None = None) -> bool:
    """Make this process return large blocks to the system as soon as they are freed. Call it once, at the start.

    Returns False when the libc has no such setting (musl needs none; others keep their behaviour).

    glibc gives large blocks a mapping of their own, but raises the threshold to up to 32 MiB once such a block was
    freed. From then on large blocks come from the heap, which shrinks only at its end: after a hundred request bodies
    at once their memory stayed in the process for ever. Setting the threshold turns this off. A mapped block costs a
    page fault for every 4 KiB, some 0.2 ms for 1 MiB: so what a version is made of is below the threshold, and each
    heap keeps `_KEPT_FREE` for the next chunks. All threads share `_HEAPS` heaps.
    """
    try:
        mallopt = ctypes.CDLL(libc).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    wanted = ((_MMAP_THRESHOLD, _MAPPED_FROM), (_TRIM_THRESHOLD, _KEPT_FREE), (_ARENA_MAX, _HEAPS))
    return all(mallopt(name, value) for name, value in wanted)


def _machine(root: Path) -> int | None:
    for line in lines_of(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _groups(root: Path) -> Iterator[int | None]:
    """The bytes that each control group above this process leaves."""
    for group, version in control_groups(root, "memory"):
        if version == 2:
            yield _left(group, "memory.max", "memory.current", ("inactive_file", "active_file"))
        else:
            cache = ("total_inactive_file", "total_active_file")
            yield _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", cache)


def _left(group: Path, limit: str, usage: str, cache: tuple[str, ...]) -> int | None:
    most, used = number_in(group / limit), number_in(group / usage)
    if most is None or used is None or most >= _NO_LIMIT:
        return None
    stat = dict(line.split(maxsplit=1) for line in lines_of(group / "memory.stat") if " " in line)
    return max(0, most - used + sum(int(stat.get(name, 0)) for name in cache))
