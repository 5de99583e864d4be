"""Lets this folder's tests share `saved_kit`: under `--import-mode=importlib` no test folder is on the path."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
