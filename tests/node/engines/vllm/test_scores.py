"""Scores of a text that is read in pieces in shared batches, by both of vLLM's model runners. Needs no vLLM."""

import importlib
import sys
from types import ModuleType
from types import SimpleNamespace as Space
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

NAME = "node.engines.vllm.plugin.swarm_vllm.scores"
VOCABULARY, LENGTH = 50, 30
PIECES = [(0, 11), (11, 18), (29, 1)]
"""(first token, count) of each step; the last step has nothing to score."""
BY = (0.5, 0.9, 0.95)


class PromptLogprobs(NamedTuple):
    ids: Any
    logprobs: Any
    ranks: Any


class Runner:
    def _get_prompt_logprobs_dict(self, states: Any, scheduled: Any) -> dict:
        return {}


def top_p(logits: Any, k: None, p: Any) -> Any:
    """As in vLLM: a token is cut off when the likelier tokens already reach p."""
    ordered, order = logits.sort(-1)
    cut = ordered.softmax(-1).cumsum(-1) <= 1 - p[:, None]
    cut[:, -1] = False
    return torch.empty_like(logits).scatter_(-1, order, ordered.masked_fill(cut, float("-inf")))


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> Any:
    def fake_module(name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.ops", "vllm.v1.worker"):
        fake_module(name)
    fake_module("vllm.sampling_params", RequestOutputKind=object, SamplingParams=object)
    fake_module("vllm.v1.outputs", LogprobsTensors=PromptLogprobs)
    fake_module("vllm.v1.sample.ops.topk_topp_sampler", apply_top_k_top_p=top_p)
    fake_module("vllm.v1.worker.gpu_model_runner", GPUModelRunner=Runner)
    module = importlib.import_module(NAME)
    monkeypatch.setattr(module, "_ROWS", 3)
    yield module
    del sys.modules[NAME]


@pytest.fixture
def text() -> Any:
    """Logits (in the place of hidden states), token ids, and the expected score of each token but the first."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(LENGTH, VOCABULARY, generator=chance)
    ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=chance)
    likely = (logits[:-1] / BY[0]).softmax(-1)
    wanted = []
    for row, token in zip(likely, ids[1:], strict=True):
        before = row[row > row[token]].sum()
        ordered = row.sort(descending=True).values
        mass = ordered[(ordered.cumsum(0) - ordered) < BY[1]].sum()
        wanted.append((row[token] / mass).log() if before < BY[2] else torch.tensor(float("-inf")))
    return Space(logits=logits, ids=ids, wanted=torch.stack(wanted))


def same(states: Any) -> Any:
    return states


def test_the_newer_runner(scores, text):
    class Worker:
        uses_prompt_logprobs = np.zeros(9, bool)

        def _swarm_add(self, name: str, slot: int, sampling: Any) -> None:
            self.uses_prompt_logprobs[slot] = True

        def _swarm_compute(self, *_: Any) -> dict:
            return {}

    worker = Worker()
    scores._add_request(worker, "ours", 4, Space(extra_args={scores.ASK: list(BY)}))
    scores._add_request(worker, "users", 1, Space(extra_args=None))
    assert worker.uses_prompt_logprobs.nonzero()[0].tolist() == [1], "vLLM itself must not score our request"
    all_ids = torch.zeros(9, 40, dtype=torch.int32)
    all_ids[4, :LENGTH] = text.ids
    for first, count in PIECES:
        batch = Space(
            req_ids=["users", "ours"],
            idx_mapping_np=np.array([1, 4]),
            num_computed_prefill_tokens_np=np.array([0, first]),
            query_start_loc_np=np.array([0, 5, 5 + count]),
            num_scheduled_tokens=np.array([5, count]),
            prefill_len_np=np.array([LENGTH, LENGTH]),
        )
        states = torch.cat([torch.zeros(5, VOCABULARY), text.logits[first : first + count]])
        found = scores._compute(worker, same, states, batch, all_ids, None, np.full(9, LENGTH))
        assert (not found) == (first + count < LENGTH)
    torch.testing.assert_close(found["ours"].logprobs[:, 0], text.wanted)
    assert found["ours"].ranks.tolist() == [0] * (LENGTH - 1)
    assert not worker._swarm_asked


@pytest.mark.parametrize("broken", [False, True])
def test_the_older_runner(scores, text, broken: bool):
    request = Space(
        sampling_params=Space(extra_args={scores.ASK: list(BY)}),
        prompt_token_ids=text.ids.tolist(),
        in_progress_prompt_logprobs_cpu=None,
        num_computed_tokens=0,
    )
    runner = Space(
        num_prompt_logprobs={"ours": 0},
        requests={"ours": request},
        query_start_loc=Space(np=np.array([0, 5, 99])),
        input_batch=Space(req_id_to_index={} if broken else {"ours": 1}),
        model=Space(compute_logits=same),
    )
    for first, count in PIECES:
        request.num_computed_tokens = first
        states = torch.cat([torch.zeros(5, VOCABULARY), text.logits[first : first + count]])
        found = scores._prompt_logprobs(runner, states, {"users": 5, "ours": count})
        if broken:  # by a vLLM with other internals: no score is returned, and the engine goes on
            assert found == {}
        elif first + count < LENGTH:
            assert found == {}
            assert runner.num_prompt_logprobs == {"ours": 0}
    assert runner.num_prompt_logprobs == {}
    if not broken:
        torch.testing.assert_close(found["ours"].logprobs[:, 0], text.wanted)


def test_a_prompt_is_scored_for_a_client_as_vllm_does_it(scores, text):
    """At temperature 1 over the whole vocabulary, with ranks and the likeliest tokens, by both runners."""
    wanted = text.logits[:-1].log_softmax(-1)
    own = wanted.gather(-1, text.ids[1:, None])
    extra = scores.of_prompt(3)
    assert scores.of_prompt(None) == {}
    by = scores._asked(Space(extra_args=extra))
    assert (by.temperature, by.top_p, by.top) == (1.0, 1.0, 3)
    request = Space(
        sampling_params=Space(extra_args=extra),
        prompt_token_ids=text.ids.tolist(),
        in_progress_prompt_logprobs_cpu=None,
        num_computed_tokens=0,
    )
    runner = Space(
        num_prompt_logprobs={"ours": 3},
        requests={"ours": request},
        query_start_loc=Space(np=np.array([0, 99])),
        input_batch=Space(req_id_to_index={"ours": 0}),
        model=Space(compute_logits=same),
    )
    worker = Space(uses_prompt_logprobs=np.zeros(9, bool), _swarm_add=lambda *_: None, _swarm_compute=lambda *_: {})
    scores._add_request(worker, "ours", 0, Space(extra_args=extra))
    all_ids = text.ids[None].to(torch.int32)
    lengths = np.array([LENGTH])
    older: dict = {}
    newer: dict = {}
    for first, count in PIECES:
        states, request.num_computed_tokens = text.logits[first : first + count], first
        older |= scores._prompt_logprobs(runner, states, {"ours": count})
        batch = Space(
            req_ids=["ours"], idx_mapping_np=np.array([0]), num_computed_prefill_tokens_np=np.array([first]),
            query_start_loc_np=np.array([0, count]), num_scheduled_tokens=np.array([count]),
            prefill_len_np=np.array([LENGTH]),
        )  # fmt: skip
        newer |= scores._compute(worker, same, states, batch, all_ids, None, lengths)
    for found in (older["ours"], newer["ours"]):
        torch.testing.assert_close(found.logprobs[:, :1], own)
        torch.testing.assert_close(found.logprobs[:, 1:], wanted.topk(3).values)
        assert found.ids.tolist() == torch.cat([text.ids[1:, None], wanted.topk(3).indices], -1).tolist()
        assert found.ranks.tolist() == (wanted >= own).sum(-1).tolist()
    scores._add_request(worker, "ours", 0, Space(extra_args=extra))  # it was preempted after its first tokens
    batch.prefill_len_np = np.array([LENGTH + 4])
    assert scores._compute(worker, same, states, batch, all_ids, None, lengths) == {}, "its client has the scores"


def test_scores_that_vllm_computed_itself_are_refused(scores):
    def at(rank: int) -> dict:
        return {7: Space(logprob=-1.5, rank=rank)}

    assert scores.read([None, at(0)], (7,)) == (-1.5,)
    for wrong in ([None, at(1)], [None, {8: Space(logprob=-1.0, rank=0)}], [None], None, []):
        with pytest.raises(ValueError, match="vLLM"):
            scores.read(wrong, (7,))


def test_ranks_tell_margins(scores):
    """What a worker puts into ranks is what the front reads; a rank of vLLM's own, or none, is refused."""
    from node.engines.vllm.plugin.swarm_vllm.margins import MOST_MARGIN
    from node.verification import draws

    assert MOST_MARGIN == draws.MOST_MARGIN
    by = scores._By(1.0, 1.0, 1.0, noise=(1, 2))
    ids = torch.tensor([5, 6, 7, 8])
    told = torch.tensor([0.0, 0.123456789, MOST_MARGIN])
    packed = scores._as_prompt_logprobs(
        ids, scores._Found(torch.stack([torch.full((3,), -1.0), told]), *2 * [torch.empty(3, 0)]), by
    )
    prompt = [
        None,
        *({int(i): Space(logprob=-1.0, rank=int(rank))} for i, rank in zip(ids[1:], packed.ranks, strict=True)),
    ]
    assert scores.read_margins(prompt, (6, 7, 8)) == pytest.approx(told.tolist(), abs=1e-6)
    assert scores.read_margins(prompt, (8,)) == (MOST_MARGIN,)
    assert scores.read(prompt, (6, 7, 8)) == (-1.0,) * 3
    with pytest.raises(ValueError, match="judge"):
        scores.read_margins([{8: Space(logprob=-1.0, rank=0)}], (8,))


@pytest.mark.parametrize("how", [{}, {"top_p": 0.7}, {"options": {"top_k": 3}}, {"temperature": 0.0}])
def test_a_workers_margins_are_those_of_the_transformers_engine(scores, how):
    import msgspec

    from node.engines.base import SamplingOptions, SamplingParams
    from node.engines.sampling import margins

    chance = torch.Generator().manual_seed(3)
    logits, claimed = torch.randn(20, VOCABULARY, generator=chance) * 2, torch.randint(0, VOCABULARY, (20,))
    options = how.get("options", {})
    fields = {name: value for name, value in how.items() if name != "options"}
    sampling = SamplingParams(20, seed=9, options=SamplingOptions(portable=True, **options), **fields)
    by = scores._By(
        sampling.temperature, sampling.top_p, sampling.widest_top_p,
        msgspec.convert(options, scores.Options), (), 4, sampling.tightest_top_p, (9, 6),
    )  # fmt: skip
    found = scores._margins(logits, claimed, 3, by)
    torch.testing.assert_close(found, margins(logits, claimed, sampling, 6), atol=1e-6, rtol=0)


def test_a_request_that_asks_wrongly_is_not_ours(scores):
    for extra in (
        None,
        {},
        {"swarm_score": "x"},
        {"swarm_score": [1.0, 2.0]},
        {"swarm_score": [1, 1, 1, {"top_k": "x"}, [], 0]},
    ):
        assert scores._asked(Space(extra_args=extra)) is None
    good = [1.0, 1.0, 1.0, {}, [], 3]
    assert scores._asked(Space(extra_args={"swarm_score": good})).prompt == 3
    assert scores._asked(Space(extra_args={"swarm_score": good, "swarm_margins": [0.9, "x", 1]})) is None
    assert scores._asked(Space(extra_args={"swarm_score": good, "swarm_margins": [0.9, 5, 1]})).noise == (5, 1)
