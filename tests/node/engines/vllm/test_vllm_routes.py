"""A real vLLM on a CPU tells which experts each token took: those that the model's own routers choose."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec.routes import decode_routes, read_header
from node.engines.base import ROUTES, Prompt, SamplingOptions, SamplingParams

pytestmark = pytest.mark.vllm
ROUTED = SamplingOptions(routes=True)
TOKENS = 12


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scenarios.engines.engine_models import make_experts

    return make_experts(tmp_path_factory.mktemp("models") / "experts")


@pytest.fixture(scope="module")
def live(experts: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from scenarios.engines.engine_bench import PROBE_ENV, SMALL, bench

    more = (*SMALL, "--worker-extension-cls", "swarm_experts.Experts")
    with bench(experts, tmp_path_factory.mktemp("live"), python, more=more, env=PROBE_ENV, threads=1) as running:
        yield running


def of_the_model(folder: Path, text: list[int]) -> Any:
    """(ids of each position, (positions, layers, k); the lead of the last chosen expert's logit over the next)."""
    import torch
    from transformers import AutoModelForCausalLM

    from node.engines.routing import Recorder, route_shape, routers

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape = route_shape(model)
    assert shape is not None
    logits: list[Any] = []
    for router in routers(model):
        router.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    recorder = Recorder(model, shape)
    with torch.no_grad(), recorder.recording() as found:
        model(input_ids=torch.tensor([text]), use_cache=False)
    ordered = torch.stack(logits, 1).sort(dim=-1, descending=True).values
    lead = ordered[..., shape.chosen - 1] - ordered[..., shape.chosen]
    return np.sort(recorder.routes(found, 1)[0], -1), lead.numpy(), shape


def test_routes_are_those_of_the_models_routers(experts: Path, live: Any) -> None:
    """vLLM computes in bfloat16: where two experts are nearly as likely it may choose another one, and so may later
    layers, which read what that one computed."""
    long = tuple(range(3, 153))  # longer than a block of the prefix cache
    prompts = [Prompt(long, 0, routes=True), Prompt(long, 1), Prompt((8,), 2)]
    equal, leads = [], []
    for _ in range(2):  # the second time, prompts are in the prefix cache
        for prompt, one in zip(prompts, live.generate(prompts, SamplingParams(TOKENS, options=ROUTED)), strict=True):
            wanted, lead, shape = of_the_model(experts, [*prompt.token_ids, *one.token_ids])
            assert read_header(one.routes) == (shape, TOKENS)
            first = len(prompt.token_ids) - 1
            pairs = [(decode_routes(one.routes, shape, TOKENS), slice(first, first + TOKENS))]
            assert bool(one.prompt_routes) == prompt.routes
            if prompt.routes:
                pairs.append((decode_routes(one.prompt_routes, shape, first), slice(0, first)))
            for found, where in pairs:
                equal.append((found == wanted[where]).all(-1))
                leads.append(lead[where])
    same, lead = np.concatenate(equal), np.concatenate(leads)
    assert same[:, 0][lead[:, 0] > 0.2].all()
    assert same[lead > 0.2].mean() > 0.98
    assert same.mean() > 0.95


def test_requests_without_routes_have_none(live: Any) -> None:
    (one,) = live.generate([Prompt((5, 9), 0, routes=True)], SamplingParams(3))
    assert (one.routes, one.prompt_routes) == (b"", b"")


def test_the_engine_names_the_ability(live: Any) -> None:
    assert ROUTES in live.engine.abilities
