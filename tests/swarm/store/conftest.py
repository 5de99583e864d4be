"""The store's tests use the shell's kit for models and steps: under `--import-mode=importlib` it is not on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
