"""Installs this checkout's plugins into the environment of an engine, once for each state of their sources."""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scenarios.harness.environments import Locked, cache_folder, pip_install

__all__ = ["install_plugins"]


def install_plugins(python: Path, engine: str, plugins: Sequence[Path]) -> None:
    """Install the distributions in these folders, unless the environment of `python` has them as they are.

    Raises `CalledProcessError` when an installation fails.
    """
    marker, digest = python.parent.parent / f".swarm-{engine}", _digest(plugins)
    with Locked(cache_folder() / f"{engine}-plugin.lock"):
        if marker.exists() and marker.read_text() == digest:
            return  # do not reinstall: another engine may be importing them
        with tempfile.TemporaryDirectory() as folder:  # a build writes files beside the sources
            copies = [Path(folder) / str(i) for i in range(len(plugins))]
            for plugin, copy in zip(plugins, copies, strict=True):
                shutil.copytree(plugin, copy, ignore=shutil.ignore_patterns("__pycache__", "build"))
            pip_install(python, "--no-deps", "--no-build-isolation", "--force-reinstall", *map(str, copies))
        marker.write_text(digest)


def _digest(plugins: Sequence[Path]) -> str:
    """Return a digest of the plugins' sources."""
    hasher = hashlib.sha256()
    for plugin in plugins:
        for path in sorted(plugin.rglob("*")):
            if path.suffix in (".py", ".toml"):
                hasher.update(path.relative_to(plugin).as_posix().encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()
