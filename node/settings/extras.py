"""How the packages of an extra are installed where this process runs: a command that works as it stands."""

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["how_to_get", "lacking"]

ROOT: Final = Path(__file__).parents[2]
"""Of a clone: has the Makefile. Of an installed package: site-packages."""


def lacking(modules: Sequence[str]) -> list[str]:
    """Those that cannot be imported here; looks without importing them."""
    return [name for name in modules if find_spec(name) is None]


def how_to_get(extra: str) -> str:
    """A command that adds `extra` to this environment. swarm-node is on no package index, so pip is never told to fetch
    it from one: in the environment that `make install` made it is make that adds to it, in another one with a clone pip
    installs from the clone, and without a clone it installs what the extra needs."""
    if not (ROOT / "install.sh").is_file():
        return shlex.join([sys.executable, "-m", "pip", "install", *_needs(extra)])
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        where = [] if Path.cwd() == ROOT else ["-C", str(ROOT)]
        return shlex.join(["make", *where, "install", f"EXTRAS={extra}"])
    return shlex.join([sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[{extra}]"])


def _needs(extra: str) -> list[str]:
    """Requirements of an extra, as its package says."""
    try:
        found = requires("swarm-node") or []
    except PackageNotFoundError:
        found = []
    marker = re.compile(rf"""\s*;.*\bextra\s*==\s*['"]{re.escape(extra)}['"].*""")
    return [marker.sub("", line).replace(" ", "") for line in found if marker.search(line)]
