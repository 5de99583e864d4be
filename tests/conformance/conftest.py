"""The matrices of `scenarios.conformance`.

`make test` runs a handful of cells, the heavy tests one of each kind, and the long tests all of them.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "node" / "gateway")]

HAS_TORCH = find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    if HAS_TORCH:
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        torch.set_num_threads(1)
