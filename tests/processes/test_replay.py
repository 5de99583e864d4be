"""`swarm-node replay` beside a running seed, and a bundle of it far from the swarm: real processes, real weights."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from memory_kit import generates, step

from node.engines.base import SamplingOptions, SamplingParams
from node.trainers.api import Swarm
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")]


def replay(*words: str, code: int = 0) -> str:
    ended = subprocess.run([sys.executable, "-m", "node.cli", "replay", *words], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    return ended.stdout if code != 2 else ended.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of two versions of a random model."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    base = tmp_path_factory.mktemp("base")
    save_bf16(random_model(TinyRecipe(vocabulary=64, hidden=64, inner=96, layers=2, seed=1)), base)
    return [base, step(base, tmp_path_factory.mktemp("steps") / "1", 1)]


def test_a_sample_is_drawn_again_here_and_far_away(tmp_path: Path, folders: list[Path]) -> None:
    from transformers import AutoModelForCausalLM

    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0])
        engine = ("--device", "cpu", "--threads", "1", *LOOPBACK)
        swarm.start("node", "join", swarm.ticket(), *engine, "--model", str(folders[0]))
        swarm.until("node", generates(0), STARTED_WITHIN_S)
        swarm.publish(folders[1], "--wait")
        swarm.until("node", generates(1))
        home = ("--home", str(swarm.home("seed")), "--json")
        assert json.loads(replay(*home)) == []
        wanted = SamplingParams(max_tokens=12, seed=5, options=SamplingOptions(portable=True))
        model: Any = AutoModelForCausalLM.from_pretrained(folders[1])
        with Swarm.attach(model, home=swarm.home("seed")) as trainer:
            (group,) = trainer.rollouts([[1, 2, 3]], 1, wanted, timeout_s=60)
        (listed,) = json.loads(replay(*home))
        assert (listed["tokens"], listed["oldest"], listed["portable"]) == (12, [0, 1], True)
        found = json.loads(replay(listed["sample"], "--threads", "1", "--device", "cpu", *home))
        assert found["exact"], found
        file = tmp_path / "sample.bin"
        replay(listed["sample"].split("/")[0][:6] + "/0", "--out", str(file), *home)

    # Elsewhere: no swarm, and no home of it.
    words = (str(file), "--threads", "1", "--device", "cpu", "--home", str(tmp_path / "nowhere"))
    said = replay(*words, "--weights", str(folders[1]))
    assert "all 12 tokens and log-probabilities are the same bits (version 1)" in said
    assert len(group.rollouts[0].token_ids) == 12
    assert "holds nothing of this swarm" in replay(*words, "--weights", str(folders[0]), code=2)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    said = replay(*words, "--weights", str(folders[1]), code=2)
    assert "swarm-node: " in said
    assert len(said.splitlines()) == 1
