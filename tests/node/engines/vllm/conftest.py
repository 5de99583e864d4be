"""Real vLLMs. Each takes half a minute to start, so tests share them.

Each rank has one thread: two threads that wait for each other on two busy cores take twenty times as long.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scenarios.engines.engine_bench import PROBE_ENV

Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="session")
def python() -> Path:
    from scenarios.engines.vllm_environment import vllm_python

    return vllm_python()


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scenarios.engines.engine_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scenarios.engines.engine_models import make_qwen3

    return make_qwen3(tmp_path_factory.mktemp("models") / "tied", tied=True, seed=1)


@pytest.fixture(scope="session")
def one(untied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An untied Qwen3 on one rank. Tests share it, and each leaves it open, at any version."""
    from scenarios.engines.engine_bench import bench

    with bench(untied, tmp_path_factory.mktemp("one"), python, threads=1) as live:
        yield live


@pytest.fixture(scope="session")
def two(tied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tied Qwen3 on two ranks."""
    from scenarios.engines.engine_bench import bench

    with bench(tied, tmp_path_factory.mktemp("two"), python, ranks=2, threads=2) as live:
        yield live


@pytest.fixture(scope="session")
def fresh(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Answers]]:
    """Asks fresh engines of given checkpoints for greedy tokens and log-probabilities."""
    from node.engines.vllm.server import environment
    from scenarios.engines import engine_fresh

    def ask(
        folders: list[Path],
        prompts: list[list[int]],
        tokens: int,
        ranks: int = 1,
        scored: int | None = None,
        images: list[list[str]] | None = None,
        **more: Any,
    ) -> list[Any]:
        file = tmp_path_factory.mktemp("fresh") / "questions.json"
        questions = {"prompts": prompts, "tokens": tokens, "folders": [str(f) for f in folders], "more": more}
        questions["prompt_logprobs"], questions["images"] = scored, images
        file.write_text(json.dumps(questions))
        env = environment({"PATH": "/usr/bin:/bin"}, ranks, True, ranks) | PROBE_ENV
        command = [python, engine_fresh.__file__, str(file), str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FRESH ")]
        assert len(lines) == len(folders), done.stderr[-3000:]
        return [[tuple(answer) for answer in json.loads(line[6:])] for line in lines]

    return ask
