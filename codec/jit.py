"""Compiling kernels once a machine: numba's disk cache, keyed on what the kernels really are.

numba keeps stale machine code when a callee in another file changes, and fails on a read-only install without a home
folder. So each set of sources gets a cache folder of its own, named after their hash, under `SWARM_CACHE`, the user's
cache folder, or (where neither can be written) a private temporary one.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
from blake3 import blake3
from numba.core import config
from platformdirs import user_cache_dir

__all__ = ["cache_folder", "compiled", "kernel"]

_SOURCES: Final = ("jit.py", "lanes.py", "scan.py", "codes.py", "planes.py")


def _digest() -> str:
    """A name for these sources under this compiler."""
    here = Path(__file__).parent
    hasher = blake3(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}".encode())
    for name in _SOURCES:
        hasher.update((here / name).read_bytes())
    return hasher.hexdigest(8)


def _usable(folder: Path) -> bool:
    """Make `folder`; whether it is ours alone to write: what lies there is run."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = folder.stat()
    except OSError:
        return False
    writable_by_others = owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return os.access(folder, os.W_OK) and owner.st_uid == os.getuid() and not writable_by_others


def _choose() -> Path:
    digest = _digest()
    roots = [Path(user_cache_dir("swarm-node")), Path(tempfile.gettempdir()) / f"swarm-node-{os.getuid()}"]
    if asked := os.environ.get("SWARM_CACHE"):
        roots.insert(0, Path(asked))
    for root in roots:
        if _usable(root / "kernels" / digest):
            return root / "kernels" / digest
    return Path(tempfile.mkdtemp(prefix="swarm-node-"))


_FOLDER: Final = _choose()


def cache_folder() -> Path:
    """Where compiled kernels lie."""
    return _FOLDER


def compiled() -> bool:
    """Whether an earlier start has left its kernels: if not, the first use compiles for some seconds, so say so."""
    return any(_FOLDER.rglob("*.nbi"))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` on first use, without the GIL, cached in `cache_folder()`."""
    settings: Any = config  # its names are made at run time
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(_FOLDER)  # read when the decorator runs, and by nobody else in between
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    finally:
        settings.CACHE_DIR = before
