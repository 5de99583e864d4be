"""Fixed hashes of strings and bytes: without them the order of sets, and so a run, differs from process to process."""

import os
import sys

__all__ = ["with_fixed_hashes"]


def with_fixed_hashes(module: str) -> None:
    """Start this process again as `python -m MODULE`, with PYTHONHASHSEED=0, unless it has that."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])
