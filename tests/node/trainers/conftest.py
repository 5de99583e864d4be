"""A random policy of 30,000 parameters that sorts three letters, badly."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Under `--import-mode=importlib` a test's folder is not on the path. The rank processes import from it too.
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *(str(HERE.parents[1] / room) for room in ("node", "processes"))]

HAS_TORCH = find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_grpo_*.py", "test_fsdp2.py"]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if HAS_TORCH:
        import torch

        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from node.trainers.grpo.tiny import TinyRecipe, make_tiny

    recipe = TinyRecipe(letters=3, hidden=32, inner=64, layers=2, heads=2, kv_heads=1, steps=2, rows=8, spread=0.1)
    folder = tmp_path_factory.mktemp("base")
    make_tiny(folder, recipe, lambda line: None)
    return folder
