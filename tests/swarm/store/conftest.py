"""The store's tests use the runtime's kit for models and steps, which `--import-mode=importlib` does not find."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
