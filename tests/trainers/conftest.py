"""A random policy of 30,000 parameters that sorts three letters, badly."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from node.trainers.grpo.tiny import TinyRecipe, make_tiny  # noqa: E402

RECIPE = TinyRecipe(letters=3, hidden=32, inner=64, layers=2, heads=2, kv_heads=1, steps=2, rows=8, spread=0.1)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_tiny(folder, RECIPE, lambda line: None)
    return folder
