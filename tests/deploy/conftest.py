"""Makes `recipe_kit` importable: under `--import-mode=importlib` the folder of a test is not on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
