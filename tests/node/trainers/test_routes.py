"""Routes in the trainer's process: read from samples, and replayed in its model or refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec.errors import UsageError
from codec.routes import RouteShape, encode_routes
from node.ledger.route_reader import BadRoutes, Routed, read_routes
from node.trainers.routes import padded_routes, replayed_routes

torch = pytest.importorskip("torch")

SHAPE = RouteShape(2, 2, 8)
V0, V1 = (0, 0), (0, 1)


def ids(tokens: int, seed: int) -> Any:
    keys = np.random.default_rng(seed).random((tokens, SHAPE.layers, SHAPE.experts))
    return np.sort(np.argsort(keys, -1)[..., : SHAPE.chosen], -1).astype(np.uint16)


def coded(tokens: int, seed: int) -> bytes:
    return encode_routes(ids(tokens, seed), SHAPE.experts)


def test_each_sample_has_the_prompts_routes_of_its_own_version_or_of_sample_0() -> None:
    samples = [
        Routed(coded(3, 0), coded(4, 10), 3, V0, b"a"),
        Routed(coded(2, 1), b"", 2, V1, b"b"),
        Routed(coded(5, 2), coded(4, 12), 5, V1, b"b"),
        Routed(coded(1, 3), b"", 1, (0, 2), b"c"),
        Routed(coded(1, 4), b"", 1, V0, b"c"),
    ]
    found = read_routes(samples, 5)
    for routes, own, first in zip(found, range(5), (10, 12, 12, 10, 10), strict=True):
        np.testing.assert_array_equal(routes, np.concatenate([ids(4, first), ids(samples[own].tokens, own)]))


def test_a_group_without_routes_has_none() -> None:
    assert read_routes([Routed(b"", b"", 3, V0)] * 2, 5) == [None, None]


@pytest.mark.parametrize(
    ("samples", "index"),
    [
        ([Routed(coded(3, 0), coded(4, 1)[:-1], 3, V0)], 0),
        ([Routed(coded(3, 0), coded(4, 1), 3, V0), Routed(coded(2, 0)[:-1], b"", 2, V0)], 1),
        ([Routed(coded(3, 0), coded(4, 1), 3, V0), Routed(coded(3, 0), b"", 2, V0)], 1),
        ([Routed(coded(3, 0), b"", 3, V0)], 0),
    ],
)
def test_routes_that_cannot_be_read_name_their_sample(samples: list[Routed], index: int) -> None:
    with pytest.raises(BadRoutes) as caught:
        read_routes(samples, 5)
    assert caught.value.index == index


def test_padding_lets_routers_choose_by_themselves() -> None:
    found = padded_routes([ids(2, 0), ids(4, 1)], 5)
    assert found.shape == (2, 5, 2, 2)
    np.testing.assert_array_equal(found[0, :2], ids(2, 0))
    assert (found[0, 2:] == -1).all()
    assert (found[1, 4:] == -1).all()


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from scenarios.rl.letter_experts import make_letter_experts

    return make_letter_experts(tmp_path_factory.mktemp("experts"))


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_a_replay_has_the_engines_log_probabilities_where_the_trainers_own_routes_differ(experts: Path) -> None:
    """The trainer's routers are moved a little: its own choices differ, and those of the engine come back by replay."""
    from node.engines.base import Prompt, SamplingOptions, SamplingParams
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo.loop import sample_group
    from node.trainers.grpo.loss import token_logprobs

    engine = TransformersEngine(threads=1)
    engine.load(experts)
    prompt = (3, 9, 4, 26)
    sampling = SamplingParams(8, seed=1, options=SamplingOptions(routes=True))
    group = sample_group(prompt, engine.generate([Prompt(prompt, 0, True), Prompt(prompt, 1)], sampling))
    model = load(experts)
    moved = load(experts)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            if name.endswith("gate.weight"):
                parameter.mul_(-1)  # every router prefers the others
    for completion, routes in zip(group.completions, group.routes, strict=True):
        text, drawn = torch.tensor([[*prompt, *completion.token_ids]]), torch.tensor([completion.token_ids])
        given = padded_routes([routes], text.shape[1])

        def score(policy: Any, text: Any = text, drawn: Any = drawn) -> Any:
            with torch.no_grad():
                return token_logprobs(
                    policy(input_ids=text, use_cache=False).logits[:, len(prompt) - 1 : -1], drawn, 1.0
                )

        with replayed_routes(model, given):
            replayed = score(model)
        assert torch.allclose(replayed[0], torch.tensor(completion.logprobs), atol=1e-5)
        own = score(moved)
        with replayed_routes(moved, given):
            assert not torch.allclose(score(moved), own, atol=1e-3), "the replay changed which experts were taken"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((1, 4, 2, 3), np.int64), r"shape \(1, 4, 2, 3\); this model needs \(texts, positions, 2, 2\)"),
        (np.zeros((1, 4, 3, 2), np.int64), "shape"),
        (np.full((1, 4, 2, 2), 8), "an expert outside 0 to 7"),
        (np.full((1, 4, 2, 2), -2), "an expert outside 0 to 7"),
    ],
)
def test_routes_that_are_not_this_models_are_refused(experts: Path, given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says), replayed_routes(load(experts), given):
        pass


def test_a_dense_model_is_refused(base: Path) -> None:
    with pytest.raises(UsageError, match="no experts"), replayed_routes(load(base), np.zeros((1, 4, 2, 2))):
        pass


def test_a_step_needs_the_routes_that_it_is_configured_for(experts: Path) -> None:
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo.loop import sample
    from node.trainers.grpo.task import SortLetters
    from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer

    trainer = GrpoTrainer(experts, SortLetters(3), GrpoConfig(prompts=2, samples=2, routes=True), device="cpu")
    engine = TransformersEngine(threads=1)
    engine.load(experts)
    groups = sample(trainer, engine)
    assert all(len(group.routes) == 2 for group in groups)
    with pytest.raises(ValueError, match="no routes"):
        trainer.step([group._replace(routes=()) for group in groups])
    assert trainer.step(groups).step == 1
