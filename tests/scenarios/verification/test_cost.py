"""The command that measures what checks cost, on a tiny random model."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from codec.checkpoint import Checkpoint
from node.engines.base import REPLAYS
from node.engines.transformers import TransformersEngine
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.tiny import TinyRecipe
from node.trainers.grpo.warmup import random_model, save_bf16
from scenarios.verification.cost import WAYS, _table, measure


def test_each_way_of_reading_has_a_ratio_to_drawing(tmp_path: Path):
    recipe = TinyRecipe(vocabulary=32, hidden=64, inner=96, layers=2, seed=5)
    save_bf16(random_model(recipe, max_position_embeddings=64), tmp_path)
    engine = TransformersEngine(threads=1, device="cpu", arithmetic="float32")
    engine.load(tmp_path)
    engine.attach(Checkpoint.open(tmp_path).layout)
    engine.measure()
    found = measure(engine, SortLetters(), rounds=2)
    assert found["samples"] == 8
    assert found["tokens"] >= 8
    assert found["ratio"]["drawn"] == 1.0
    replays = REPLAYS in engine.abilities
    assert set(found["ratio"]) == set(found["cpu_s"]) == (set(WAYS) if replays else {"drawn", "one_pass"})
    assert all(seconds > 0.0 for seconds in found["cpu_s"].values())
    printed = _table(found)
    assert WAYS["one_pass"] in printed
    assert ("does not replay" in printed) != replays
