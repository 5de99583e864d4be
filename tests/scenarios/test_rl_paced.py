"""The engine with a limited rate: what it counts, and what a lying one reports."""

from pathlib import Path

import pytest

from node.engines.base import EngineError, Prompt, SamplingParams

pytest.importorskip("torch")

LEASED = SamplingParams(max_tokens=4)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16
    from scenarios.rl.paced import PacedEngine

    recipe = TinyRecipe(vocabulary=40, hidden=32, inner=64, layers=2, seed=0)
    save_bf16(random_model(recipe, tied=True, max_position_embeddings=64), tmp_path / "model")
    monkeypatch.setenv("SCENARIO_TOKENS_S", "1e6")
    monkeypatch.setenv("SCENARIO_LIES", "1")
    monkeypatch.setenv("SCENARIO_DRAWN", str(tmp_path / "drawn"))
    engine = PacedEngine(threads=1, device="cpu")
    engine.load(tmp_path / "model")
    return engine


def test_tokens_of_finished_cancelled_and_lost_flights_are_counted(engine, tmp_path: Path):
    drawn = tmp_path / "drawn"
    for flight in (1, 2, 3):
        engine.begin(flight, [Prompt((5, 6), flight)], LEASED)
    assert engine.step() == []
    assert drawn.read_text() == "3"
    engine.cancel(1)
    engine._lost[2] = "its adapter was removed"
    ((flight, error),) = engine.step()
    assert flight == 2
    assert isinstance(error, EngineError)
    assert drawn.read_text() == "4"
    assert engine.step() == []
    ((flight, (completion,)),) = engine.step()
    assert flight == 3
    assert len(completion.token_ids) == 4
    assert completion.logprobs == (0.0,) * 4, "it lies"
    assert drawn.read_text() == "6"


def test_a_whole_batch_can_be_generated(engine):
    (completion,) = engine.generate([Prompt((5, 6), 1)], LEASED)
    assert len(completion.token_ids) == 4


def test_an_adapter_that_it_does_not_hold_is_refused(engine):
    with pytest.raises(EngineError, match="adapter"):
        engine.begin(1, [Prompt((5, 6), 1)], LEASED, "a")
    assert engine.counts() == {}
