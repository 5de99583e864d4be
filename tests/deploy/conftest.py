"""Makes `deploy_kit` and `kit` importable: under `--import-mode=importlib` no test folder is on the path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "processes"))
