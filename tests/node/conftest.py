"""Lets this folder's tests share `seed_kit`, and `kit` of `tests/processes`: under `--import-mode=importlib` no test
folder is on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "processes")]
