"""A home on a small disk (a tmpfs) that can be filled and freed. Needs root, or user namespaces.

A mount is seen by the processes of its mount namespace only, so a program that uses small disks first runs itself again
in a namespace of its own (`in_own_namespace`). The mounts vanish with its last process.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from codec.errors import UsageError

__all__ = ["SmallDisk", "in_own_namespace"]

_MARK: Final = "SCENARIO_OWN_MOUNTS"


def in_own_namespace(module: str, arguments: Sequence[str]) -> None:
    """Run `python -m module` with these arguments in a mount namespace of its own, in the place of this process; does
    nothing where it is in one already. Raises `UsageError` where that cannot be."""
    if _MARK in os.environ:
        return
    flags = ["--mount", *([] if os.getuid() == 0 else ["--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode:
        raise UsageError("Small disks need root or user namespaces, and the command unshare; or give --no-full-disk.")
    command = ["unshare", *flags, sys.executable, "-m", module, *arguments]
    os.execvpe("unshare", command, os.environ | {_MARK: "1"})


class SmallDisk:
    """A tmpfs of `size_bytes` at `folder`, which is created."""

    def __init__(self, folder: Path, size_bytes: int) -> None:
        folder.mkdir(parents=True)
        options = f"size={size_bytes},mode=700"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], check=True)
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Write until no byte is left."""
        with open(self._ballast, "wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def free(self) -> None:
        """Remove what `fill` wrote."""
        self._ballast.unlink()
