"""Virtual environments for packages that cannot be installed in the project's own environment.

Each environment is installed once from a lock file and kept in the cache folder. Its name contains a digest of the lock
file, of the Python version and, if it inherits from the project's environment, of that environment's path. An
interrupted installation leaves no marker file, so the next call deletes the folder and installs again.
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
"""Time limit in seconds of each command: creating the environment, and each `pip install`."""


def environment(name: str, lock: Path, *, inherit: bool = False) -> Path:
    """Path of the Python interpreter of an environment that holds exactly the packages that `lock` lists.

    Installs the environment first if it is not in the cache. With `inherit`, that interpreter also imports packages of
    the environment that this process runs in (torch, this checkout); that environment is never changed.

    Raises `CalledProcessError` when a package cannot be installed, and `TimeoutExpired` after `INSTALL_WITHIN_S`.
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
    """The folder named by SWARM_CACHE, or else the user's cache folder. Creates it if it does not exist."""
    named = os.environ.get("SWARM_CACHE")
    cache = Path(named) if named else user_cache_path("swarm-node")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def pip_install(python: Path, *arguments: str) -> None:
    """Run `pip install` with `arguments` in the environment of `python`.

    Raises `CalledProcessError` when pip fails, and `TimeoutExpired` after `INSTALL_WITHIN_S`.
    """
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    subprocess.run(command, check=True, timeout=INSTALL_WITHIN_S, stdout=sys.stderr)


class Locked:
    """Context manager that holds an exclusive lock on a file: two test runs may install one environment at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
