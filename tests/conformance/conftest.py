"""The matrices of `scenarios.conformance`.

`make test` runs a handful of cells, the heavy tests one of each kind, and the long tests all of them.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from node.engines.transformers import TransformersEngine

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


@pytest.fixture(scope="session")
def writer(tmp_path_factory: pytest.TempPathFactory) -> "TransformersEngine":
    """A random model with a token for each byte, which llguidance can keep to a structure."""
    from parameters_kit import make_writer

    pytest.importorskip("llguidance")
    return make_writer(tmp_path_factory.mktemp("writer"))
