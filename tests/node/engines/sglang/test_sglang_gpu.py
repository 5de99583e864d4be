"""SGLang on a GPU, with its own kernels and attention: SGLANG_PYTHON names the environment. Not run here yet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_contract import EngineContract, Subject

from node.engines.base import SamplingParams
from node.engines.interface import Engine
from node.engines.sglang.engine import SglangEngine
from node.engines.vllm.links import Listener
from scenarios.engines.engine_models import step_of
from scenarios.engines.sglang_bench import bench

pytestmark = pytest.mark.gpu

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def live(model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with bench(model, tmp_path_factory.mktemp("gpu"), python) as found:
        yield found


class TestContractOnAGpu(EngineContract):
    @pytest.fixture
    def subject(self, live: Any) -> Iterator[Subject]:
        assert live.reload() == live.replica.root
        subject = Subject(live.engine, live.replica, live.version)
        yield subject
        live.version = subject.version

    @pytest.fixture
    def detached(self, tmp_path: Path) -> Iterator[Engine]:
        engine = SglangEngine(Listener(tmp_path / "s", lambda why: None))
        yield engine
        engine.close()


def test_after_twenty_updates_it_equals_a_fresh_engine_filled_with_the_same_bits(
    live: Any, python: Path, tmp_path: Path
):
    from codec import write_checkpoint

    for seed in range(20):
        live.update(step_of(live.replica, 300 + seed, 0.01))
        assert (live.engine.live_hashes() == live.replica.hashes).all()
    write_checkpoint(tmp_path / "now", live.replica.layout, live.replica.bits, live.checkpoint.files)
    ours = live.greedy([PROMPT], 16)
    sampling = SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9, seed=2)
    drawn = live.score(PROMPT, ours[0][0], sampling)
    with bench(tmp_path / "now", tmp_path / "fresh", python) as fresh:
        assert fresh.greedy([PROMPT], 16) == ours
        assert fresh.score(PROMPT, ours[0][0], sampling) == drawn
