"""What an environment has of SGLang and of the swarm's plugin, asked of its own Python."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from node.engines.vllm.installed import PLUGIN as LIVE_WEIGHTS

__all__ = ["OLDEST", "PLUGIN", "Installed", "how_to_install", "installed"]

OLDEST: Final = (0, 5, 23)
"""The release of SGLang whose interfaces the plugin was written and tested against."""
OLDEST_PLUGIN: Final = (0, 3)
"""The version of the plugin that understands this release's requests."""
PLUGIN: Final = Path(__file__).with_name("plugin")
PROBE_WITHIN_S: Final = 60.0
"""For a Python to start and ask torch for a GPU."""

_PROBE: Final = """
import importlib.metadata as m, json
def v(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ""
gpu = False
if v("sglang"):
    import torch
    gpu = torch.cuda.is_available()
print(json.dumps([v("sglang"), v("swarm-sglang"), v("swarm-vllm"), gpu]))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """A Python environment with SGLang and the plugin. `cpu`: it sees no GPU."""

    python: Path
    version: str
    cpu: bool


def how_to_install(python: Path) -> str:
    """The command that installs the plugin and what it needs."""
    return f"{python} -m pip install {LIVE_WEIGHTS} {PLUGIN}"


def installed(python: Path) -> Installed:
    """What the environment of this Python has. Raises `UsageError` with what to install."""
    try:
        probed = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_WITHIN_S, check=True
        )
        sglang, plugin, live, gpu = json.loads(probed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"{python} is no Python that runs: give the one of SGLang's environment (--sglang-python)."
        ) from error
    if not sglang:
        raise UsageError(f"{python} has no SGLang: give the Python of an environment that has (--sglang-python).")
    if _numbers(sglang) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise UsageError(f"{python} has SGLang {sglang}; swarm-node needs {needed} or later.")
    if not plugin or not live:
        raise UsageError(f"{python} lacks the plugin. Install it: {how_to_install(python)}")
    if _numbers(plugin) < OLDEST_PLUGIN:
        raise UsageError(f"The plugin in {python}'s environment is too old. Install it again: {how_to_install(python)}")
    return Installed(python, sglang, not gpu)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
