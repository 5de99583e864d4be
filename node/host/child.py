"""How a process of swarm-node starts another one of this environment.

`python -m` would first look in the current folder, where a `node.py` or a `swarm` of the user's would hide our
packages.
"""

import os
import sys
from pathlib import Path
from typing import Final

__all__ = ["child_environment", "clone_folder", "python_module"]

_ROOT: Final = Path(__file__).parents[2]
"""In a clone: the folder with the packages. In an installed package: site-packages."""


def python_module(module: str, *words: str) -> list[str]:
    """The command that runs `module` of this program."""
    return [sys.executable, "-P", "-m", module, *words]


def child_environment() -> dict[str, str]:
    """The variables of such a process: ours, and where its packages are when they are those of a clone."""
    clone = clone_folder()
    if clone is None:
        return dict(os.environ)
    paths = [str(clone), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def clone_folder() -> Path | None:
    """The folder with our packages when they are those of a clone, which need not be installed."""
    return _ROOT if (_ROOT / "pyproject.toml").is_file() else None
