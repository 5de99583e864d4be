"""Creates a separate environment with SGLang's released wheel for CPUs, for the scenarios and tests that run one.

It inherits torch, transformers and other packages from the environment with vLLM, in the versions that both work with.
`python -m scenarios.engines.sglang_environment` creates it and prints its Python. SGLANG_PYTHON names another one.
"""

import os
import subprocess
from pathlib import Path
from typing import Final

from scenarios.engines.plugins import install_plugins
from scenarios.engines.vllm_environment import LOCK as INHERITED
from scenarios.engines.vllm_environment import PLUGIN as LIVE_WEIGHTS
from scenarios.harness.environments import environment

__all__ = ["sglang_python"]

LOCK: Final = Path(__file__).with_name("sglang-cpu.txt")
PLUGIN: Final = Path(__file__).parents[2] / "node" / "engines" / "sglang" / "plugin"
_WITHIN_S: Final = 60.0
_FOLDER: Final = "import sysconfig; print(sysconfig.get_path('purelib'))"


def sglang_python() -> Path:
    """Return the Python of an environment with SGLang and this checkout's plugin.

    The first call takes a minute and 1.5 GB, and the environment with vLLM if that is not there yet. Raises
    `CalledProcessError` when an installation fails.
    """
    named = os.environ.get("SGLANG_PYTHON")
    python = Path(named) if named else _inheriting(environment("sglang", LOCK), environment("vllm", INHERITED))
    install_plugins(python, "sglang", [LIVE_WEIGHTS, PLUGIN])
    return python


def _inheriting(python: Path, other: Path) -> Path:
    """`python`, which imports packages of `other`'s environment that its own has not."""
    ours, theirs = (Path(_purelib(one)) for one in (python, other))
    file = ours / "inherited.pth"
    if not file.exists():
        file.write_text(f"{theirs}\n")
    return python


def _purelib(python: Path) -> str:
    command = [python, "-c", _FOLDER]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WITHIN_S).stdout.strip()


if __name__ == "__main__":
    print(sglang_python())
