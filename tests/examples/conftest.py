"""Makes the kits of `tests/node` (a seed without a network) and `tests/processes` (real processes) importable."""

import sys
from pathlib import Path

# Under `--import-mode=importlib` no test folder is on the path.
TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / room) for room in ("node", "processes")]
