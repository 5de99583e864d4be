"""Environments of their own for what cannot live in the project's: made once from a lock file, and kept in the cache.

Named by a digest of what is locked; one that was cut short has no marker, and is made anew.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

__all__ = ["Locked", "cache_folder", "environment", "pip_install"]

INSTALL_WITHIN_S: Final = 900.0


def environment(name: str, lock: Path, *, inherit: bool = False) -> Path:
    """The Python of an environment that holds exactly what `lock` lists. `inherit`: what it lacks is looked for in the
    environment that we run in (the project's own: torch, this checkout), which it never changes.

    Raises `CalledProcessError` when something cannot be installed.
    """
    key = lock.read_bytes() + sys.version.encode() + (sys.prefix.encode() if inherit else b"")
    folder = cache_folder() / f"{name}-{hashlib.sha256(key).hexdigest()[:16]}"
    python, marker = folder / "bin" / "python", folder / ".installed"
    with Locked(folder.with_suffix(".lock")):
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"installing {lock.stem} into {folder}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_WITHIN_S)
            pip_install(python, "--no-deps", "--no-compile", "-r", str(lock))
            if inherit:
                ours = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
                (ours / "inherited.pth").write_text(sysconfig.get_path("purelib") + "\n")
            marker.touch()
    return python


def cache_folder() -> Path:
    """SWARM_CACHE, or the user's cache folder; it is there afterwards."""
    told = os.environ.get("SWARM_CACHE")
    cache = Path(told) if told else user_cache_path("swarm-node")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def pip_install(python: Path, *arguments: str) -> None:
    """Raises `CalledProcessError`."""
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    subprocess.run(command, check=True, timeout=INSTALL_WITHIN_S, stdout=sys.stderr)


class Locked:
    """Hold a file's lock: two test runs may want an environment at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
