"""The `kernel` decorator: compiles a function with numba once per machine, with a cache keyed on all kernel sources.

numba's own cache keeps stale machine code when a callee in another file changes, and fails for a read-only installation
without a home folder. So each version of the sources gets a cache folder named after their hash, under `SWARM_CACHE`,
the user's cache folder or, if neither is writable, a private temporary folder.
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

_SOURCES: Final = ("jit.py", "lanes.py", "scan.py", "codes.py", "planes.py", "quantise.py", "rans.py", "routes.py")


def _digest() -> str:
    """The hash of the kernel sources and of the versions of the compiler and of Python, in hex."""
    here = Path(__file__).parent
    hasher = blake3(f"{numba.__version__} {llvmlite.__version__} {sys.version_info[:2]}".encode())
    for name in _SOURCES:
        hasher.update((here / name).read_bytes())
    return hasher.hexdigest(8)


def _usable(folder: Path) -> bool:
    """Create `folder`; whether only this user can write to it. That is required, since the code in it is executed."""
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
    """The folder of the compiled kernels."""
    return _FOLDER


def compiled() -> bool:
    """Whether compiled kernels are cached. If not, the first use compiles for several seconds: tell the user."""
    return any(_FOLDER.rglob("*.nbi"))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` on first use, without the GIL, cached in `cache_folder()`."""
    settings: Any = config  # numba creates its attributes at run time
    before = settings.CACHE_DIR
    settings.CACHE_DIR = str(_FOLDER)  # numba reads it while the decorator runs
    try:
        return numba.njit(nogil=True, cache=True, boundscheck=False)(function)
    finally:
        settings.CACHE_DIR = before
