"""Routes of mixtures of experts: an engine records them exactly, and a replay of them changes no bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from codec.routes import decode_routes, encode_routes, read_header
from node.engines.base import ROUTES, Prompt, SamplingOptions, SamplingParams
from node.engines.routing import Recorder, forced, recordable, route_shape
from node.engines.transformers import TransformersEngine
from scenarios.conformance.families import tiny

FAMILIES = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "gpt_oss")
"""Softmax before and after the choice, with and without a norm; groups of experts with a bias, and dense layers."""
ROUTED = SamplingOptions(routes=True)


def make(family: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(tiny(family, tied=False)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)
    return model


@pytest.fixture(params=["qwen3_moe", "olmoe"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> TransformersEngine:
    make(request.param).save_pretrained(tmp_path)
    engine = TransformersEngine(threads=1)
    engine.load(tmp_path)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_of_recorded_routes_changes_no_bit(family: str) -> None:
    model, ids = make(family), torch.randint(0, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    shape = recordable(model)
    assert shape is not None
    recorder = Recorder(model, shape)
    with torch.no_grad(), recorder.recording() as found:
        wanted = model(input_ids=ids, use_cache=False).logits
    data = [encode_routes(routes, shape.experts) for routes in recorder.routes(found, 3)]
    routes = np.stack([decode_routes(one, shape, 7) for one in data])
    with torch.no_grad(), forced(model, torch.from_numpy(routes.astype(np.int64)), shape):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_forced_model_takes_the_given_experts_and_trains(family: str) -> None:
    model, ids = make(family), torch.arange(10)[None]
    shape = route_shape(model)
    assert shape is not None
    keys = np.random.default_rng(0).random((1, 10, shape.layers, shape.experts))
    given = np.sort(np.argsort(keys, -1)[..., : shape.chosen], -1)
    given[0, 4] = -1
    recorder = Recorder(model, shape)
    with forced(model, torch.from_numpy(given), shape), recorder.recording() as found:
        model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    taken = np.sort(recorder.routes(found, 1), -1)
    kept = np.arange(10) != 4
    np.testing.assert_array_equal(taken[:, kept], given[:, kept])
    gates = [p.grad for name, p in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    assert gates
    assert all(grad is not None and bool(grad.any()) for grad in gates), "weights come from the model's own routers"
    with torch.no_grad(), recorder.recording() as found:
        model(input_ids=ids, use_cache=False)
    assert not np.array_equal(np.sort(recorder.routes(found, 1), -1)[:, kept], given[:, kept]), "the block has ended"


def test_a_batch_of_another_size_is_refused() -> None:
    model = make("qwen3_moe")
    shape = route_shape(model)
    assert shape is not None
    given = torch.zeros((1, 3, shape.layers, shape.chosen), dtype=torch.int64)
    with forced(model, given, shape), pytest.raises(ValueError, match="of 3 positions, and the batch has 4"):
        model(input_ids=torch.zeros((1, 4), dtype=torch.int64))


def test_a_router_that_does_not_choose_by_topk_is_refused() -> None:
    model = make("phimoe")
    shape = route_shape(model)
    assert shape is not None
    given = torch.zeros((1, 4, shape.layers, shape.chosen), dtype=torch.int64)
    with forced(model, given, shape), pytest.raises(ValueError, match="do not choose by topk"):
        model(input_ids=torch.zeros((1, 4), dtype=torch.int64))


@pytest.mark.parametrize("cached", [True, False])
def test_an_engine_returns_the_routes_of_the_pass_that_drew_each_token(
    engine: TransformersEngine, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_can_cache", lambda: cached)
    sampling = SamplingParams(6, seed=3, options=ROUTED)
    prompts = [Prompt((5, 9, 2, 7), 0, routes=True), Prompt((5, 9, 2, 7), 1), Prompt((8,), 2, routes=True)]
    completions = engine.generate(prompts, sampling)
    model = engine._model
    assert model is not None
    shape = route_shape(model)
    assert shape is not None
    for prompt, completion in zip(prompts, completions, strict=True):
        text = [*prompt.token_ids, *completion.token_ids]
        recorder = Recorder(model, shape)
        with torch.no_grad(), recorder.recording() as found:
            model(input_ids=torch.tensor([text]), use_cache=False)
        wanted, first = np.sort(recorder.routes(found, 1)[0], -1), len(prompt.token_ids) - 1
        assert read_header(completion.routes) == (shape, 6)
        np.testing.assert_array_equal(decode_routes(completion.routes, shape, 6), wanted[first:-1])
        assert bool(completion.prompt_routes) == prompt.routes
        if prompt.routes:
            np.testing.assert_array_equal(decode_routes(completion.prompt_routes, shape, first), wanted[:first])


def test_only_an_engine_with_experts_names_the_ability(engine: TransformersEngine, tmp_path: Path) -> None:
    assert ROUTES not in engine.abilities, "nothing was measured yet"
    engine.measure()
    assert ROUTES in engine.abilities
    make("qwen3").save_pretrained(tmp_path / "dense")
    engine.load(tmp_path / "dense")
    engine.measure()
    assert ROUTES not in engine.abilities
    with pytest.raises(ValueError, match="no experts whose choice can be recorded"):
        engine.generate([Prompt((1, 2))], SamplingParams(2, options=ROUTED))


def test_routes_cost_nothing_unless_asked_for(engine: TransformersEngine) -> None:
    (completion,) = engine.generate([Prompt((1, 2), routes=True)], SamplingParams(2))
    assert (completion.routes, completion.prompt_routes) == (b"", b"")
