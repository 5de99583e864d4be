"""A random Qwen3 of 60,000 parameters, saved as a user saves a model.

Tests import helpers from `test_transformers` and `engine_contract`, so their folders are put on the path: with
`--import-mode=importlib` pytest does not do it.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "sglang")]
HAS_TORCH = find_spec("torch") is not None
TORCH_TESTS = [
    "test_cohort.py",
    "test_engine_contract.py",
    "test_live.py",
    "test_options.py",
    "test_replaying.py",
    "test_sampling.py",
    "test_transformers.py",
]
collect_ignore_glob = [] if HAS_TORCH else TORCH_TESTS


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    if HAS_TORCH:
        import torch

        torch.set_num_threads(1)


def make_folder(folder: Path, *, tied: bool = True, seed: int = 0) -> Path:
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    recipe = TinyRecipe(vocabulary=40, hidden=32, inner=64, layers=2, seed=seed)
    more = {"max_position_embeddings": 64, "initializer_range": 0.3}
    save_bf16(random_model(recipe, tied=tied, **more), folder)
    return folder


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("untied"), tied=False)
