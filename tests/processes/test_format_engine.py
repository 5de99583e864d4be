"""A seed, a bf16 node and an int4 node, each with an engine: roots and live bits of five versions, and a rollout."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from memory_kit import dequantised_root, generates, prove, root_of, step

from codec.formats.spec import FORMATS
from node.engines.base import SamplingParams
from node.trainers.api import Swarm
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, swarm_in

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")]

FORM = FORMATS["int4-group-e8"]
VERSIONS = 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The checkpoints of six versions of a random model."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    base, steps = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("steps")
    save_bf16(random_model(TinyRecipe(vocabulary=64, hidden=128, inner=320, layers=2, seed=1)), base)
    found = [base]
    for number in range(1, VERSIONS + 1):
        found.append(step(found[-1], steps / str(number), number))
    return found


def test_an_int4_engine_has_exactly_what_its_codes_stand_for(tmp_path: Path, folders: list[Path]) -> None:
    from transformers import AutoModelForCausalLM

    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(folders[0], "--format", FORM.name)
        ticket = swarm.ticket("--nodes", "2")
        engine = ("--device", "cpu", "--threads", "1", *LOOPBACK)
        swarm.start("bf16", "join", ticket, *engine, "--model", str(folders[0]))
        swarm.start("int4", "join", ticket, *engine, "--format", FORM.name)
        for name in ("bf16", "int4"):
            swarm.until(name, generates(0), STARTED_WITHIN_S)
        for number, folder in enumerate(folders):
            if number:
                swarm.publish(folder, "--wait")
            for name, root in (("bf16", root_of(folder)), ("int4", dequantised_root(folder, FORM))):
                swarm.until(name, generates(number))
                assert prove(swarm, name) == root, (name, number)
        assert swarm.own_status("int4").engine_reloads == 0  # each version came as changes

        # Both do work, and what they sign names the swarm's version and root.
        model: Any = AutoModelForCausalLM.from_pretrained(folders[-1])
        with Swarm.attach(model, home=swarm.home("seed")) as trainer:
            groups = list(trainer.rollouts([[1, 2, 3], [4, 5, 6]], 4, SamplingParams(max_tokens=8), timeout_s=90))
        assert sum(len(group.rollouts) for group in groups) == 8
        assert {span.version for group in groups for rollout in group.rollouts for span in rollout.spans}
