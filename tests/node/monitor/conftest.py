"""Lets this folder's tests share `browser_kit`: under `--import-mode=importlib` their folder is not on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
