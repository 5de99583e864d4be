"""The control groups that limit this process, of version 1 and 2."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["control_groups", "lines_of", "number_in"]

_MOUNT: Final = "sys/fs/cgroup"


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """The folder of each group of `controller` above this process, the nearest first, and the version (1 or 2).

    `root`: where /proc and /sys are. In a container that sees only its own group, the mount point is that group.
    """
    for line in lines_of(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from ((folder, 2) for folder in _up(root / _MOUNT, path))
        elif controller in controllers.split(","):
            yield from ((folder, 1) for folder in _up(root / _MOUNT / controller, path))


def number_in(path: Path) -> int | None:
    """The number in a file; None for "max", and when there is no such file."""
    lines = lines_of(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _up(mount: Path, path: str) -> Iterator[Path]:
    folder = mount / path.strip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(mount):
            return
        yield group
