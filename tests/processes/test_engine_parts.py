"""Engines of nodes whose model has adapter slots: they hold the base alone, wherever the node keeps its replica."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from memory_kit import step
from test_parts import SlotTrainer

from codec import Checkpoint
from codec.adapter import AdapterConfig, AdapterModule
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")
PLACES = ("ram", "disk", "engine")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of two layers."""
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    folder = tmp_path_factory.mktemp("base")
    save_bf16(random_model(TinyRecipe(vocabulary=500, hidden=64, inner=96, layers=2, seed=1)), folder)
    return folder


def all_follow(swarm: Swarm, version: int, engine: int) -> None:
    """Every node holds this version of the swarm, and its engine this version of the base, which it proves."""
    base_root = swarm.seed_status().parts.base_root
    for place in PLACES:
        swarm.until(place, lambda state: tuple(state["nodes"][0]["held"] or ()) == (0, version))
        swarm.until(place, lambda state: tuple(state["nodes"][0]["engine"] or ()) == (0, engine))
        own = swarm.own_status(place, prove=True)
        assert (own.live_root, own.live_proven) == (base_root, True), place
        assert own.root == swarm.seed_status().root


@pytest.mark.slow
def test_engines_hold_the_base_alone(tmp_path: Path, base: Path) -> None:
    first = step(base, tmp_path / "step_1", 1)
    layout = Checkpoint.open(base).layout
    modules = (AdapterModule("model.layers.0.self_attn.q_proj", 8),)
    with swarm_in(tmp_path / "swarm") as swarm:
        swarm.seed(base, "--adapters", "4", "--adapter-rank", "8")
        ticket = swarm.ticket("--nodes", "3")
        for place in PLACES:
            words = ("--replica", place, "--device", "cpu", "--threads", "1", *LOOPBACK)
            swarm.start(place, "join", ticket, *words, "--model", str(base))
        for place in PLACES:
            swarm.until(place, lambda state: state["nodes"][0]["engine"] is not None, STARTED_WITHIN_S)
        all_follow(swarm, 0, 0)
        trainer = SlotTrainer(swarm.home("seed"))
        trainer.publish(AdapterConfig("math", layout.hash, 8, 16.0, modules, {}, 1))
        all_follow(swarm, 1, 0)
        swarm.publish(first, "--wait")
        all_follow(swarm, 2, 2)
        trainer.publish(AdapterConfig("math", layout.hash, 8, 16.0, modules, {}, 2))
        all_follow(swarm, 3, 2)
        trainer.close()
