"""The command that installs an extra's packages into this environment, complete and ready to run."""

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["how_to_get", "lacking"]

ROOT: Final = Path(__file__).parents[2]
"""In a clone: the folder with the Makefile. In an installed package: site-packages."""


def lacking(modules: Sequence[str]) -> list[str]:
    """The modules that cannot be imported here; they are looked up without being imported."""
    return [name for name in modules if find_spec(name) is None]


def how_to_get(extra: str) -> str:
    """A command that adds `extra` to this environment.

    swarm-node is on no package index, so the command never asks pip to fetch it from one. In the environment that
    `make install` made, the command is make; in another environment with a clone, pip installs from the clone; without
    a clone, pip installs the packages that the extra requires.
    """
    if not (ROOT / "install.sh").is_file():
        return shlex.join([sys.executable, "-m", "pip", "install", *_needs(extra)])
    if Path(sys.prefix).resolve() == (ROOT / ".venv").resolve():
        where = [] if Path.cwd() == ROOT else ["-C", str(ROOT)]
        return shlex.join(["make", *where, "install", f"EXTRAS={extra}"])
    return shlex.join([sys.executable, "-m", "pip", "install", "-e", f"{ROOT}[{extra}]"])


def _needs(extra: str) -> list[str]:
    """The requirements of an extra, from the package's metadata."""
    from importlib.metadata import PackageNotFoundError, requires  # here, since every command imports this module

    try:
        found = requires("swarm-node") or []
    except PackageNotFoundError:
        found = []
    marker = re.compile(rf"""\s*;.*\bextra\s*==\s*['"]{re.escape(extra)}['"].*""")
    return [marker.sub("", line).replace(" ", "") for line in found if marker.search(line)]
