"""Real SGLangs. Each takes a minute to start, so tests share them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def python() -> Path:
    from scenarios.engines.sglang_environment import sglang_python

    return sglang_python()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scenarios.engines.engine_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "untied", layers=2)


@pytest.fixture(scope="module")
def one(model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An untied Qwen3 on one rank. Tests share it, and each leaves it open, at any version."""
    from scenarios.engines.sglang_bench import bench

    with bench(model, tmp_path_factory.mktemp("one"), python, threads=1) as live:
        yield live
