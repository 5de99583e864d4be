"""What SGLang's plugin computes, without SGLang: scores, margins, attention, and what is asked of a request."""

import itertools
from types import SimpleNamespace as Space
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from node.engines.vllm.plugin.swarm_vllm import noise  # noqa: E402


def test_a_score_is_the_log_probability_after_temperature_and_cuts(plugin: Any):
    scores, asked = plugin("scores"), plugin("asked")
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.25, 0.15]])).repeat(4, 1)
    tokens = torch.arange(4)

    def found(*by: float, **options: Any) -> Any:
        return scores.score_rows(logits, tokens, asked.Scoring(*by), scores.Options(**options)).exp()

    np.testing.assert_allclose(found(1.0, 1.0, 1.0), [0.1, 0.5, 0.25, 0.15], rtol=1e-5)
    np.testing.assert_allclose(found(0.0, 0.5, 0.5), [0.1, 0.5, 0.25, 0.15], rtol=1e-5)
    roots = np.sqrt([0.1, 0.5, 0.25, 0.15])
    np.testing.assert_allclose(found(2.0, 1.0, 1.0), roots / roots.sum(), rtol=1e-5)
    inside = [0.0, 0.5 / 0.75, 0.25 / 0.75, 0.15 / 0.75]  # the nucleus has 0.75; token 3 is just outside
    np.testing.assert_allclose(found(1.0, 0.7, 0.8), inside, rtol=1e-5)
    np.testing.assert_allclose(found(1.0, 1.0, 1.0, top_k=2), [0.0, 0.5 / 0.75, 0.25 / 0.75, 0.0], rtol=1e-5)


def test_the_winner_of_a_portable_draw_loses_by_nothing(plugin: Any):
    scores, asked = plugin("scores"), plugin("asked")
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    claim = asked.Asked(3, (7, 5), asked.Scoring(0.8, 0.9, 0.95, 0.85))
    rows = noise.places((7, 5, i) for i in range(6))
    logprobs = plugin("cuts").nucleus((logits / 0.8).log_softmax(-1), 0.9).log_softmax(-1)
    tokens = noise.draw(logprobs, rows)
    assert not scores.margin_rows(logits, tokens, 0, claim).any()
    assert scores.margin_rows(logits, (tokens + 1) % 40, 0, claim).mean() > 0.3


def test_a_row_of_attention_depends_on_no_other_row_and_on_no_later_key(plugin: Any):
    attend = plugin("alike").attend
    random = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(530, heads, 16, generator=random).to(torch.bfloat16) for heads in (6, 2, 2))
    whole = attend(queries, keys, values)
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None].double() for part in (queries, keys, values)), is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    assert float((whole.double() - exact).abs().max()) < 0.02
    for first, last in ((0, 1), (5, 6), (100, 140), (511, 513), (529, 530)):
        part = attend(queries[first:last], keys[:last], values[:last])
        assert torch.equal(part, whole[first:last])


def request(custom: Any, **more: Any) -> Any:
    params = Space(custom_params=custom, stop_token_ids=None)
    said = {
        "return_logprob": True,
        "logprob": Space(top_logprobs_num=1),
        "origin_input_ids": [3, 4, 5],
        "output_ids": [],
    }
    out = Space(sampling_params=params, to_finish=None, why=[], **(said | more))
    out.set_finish_with_abort = out.why.append
    return out


SCHEDULER = Space(model_config=Space(vocab_size=50, model_path="/nowhere"))


def test_what_a_request_asks_for_is_read_when_it_arrives(plugin: Any):
    running, asked = plugin("running"), plugin("asked")
    claim = asked.Asked(2, (3, 4), None, (7, 8), (9,))
    one = request({"swarm": '{"top_k":3}', "swarm_asked": msgspec.json.encode(claim).decode()}, output_ids=[7])
    running._read(SCHEDULER, one)
    assert (one.why, running.asked_of(one), running.options_of(one).top_k) == ([], claim, 3)
    assert running.text_of(one) == ([3, 4], [5, 7])
    plain = request(None)
    running._read(SCHEDULER, plain)
    assert (plain.why, running.asked_of(plain), running.options_of(plain)) == ([], None, None)
    assert running.text_of(plain) == ([3, 4, 5], [])


@pytest.mark.parametrize(
    ("custom", "more"),
    [
        ({"swarm": 5}, {}),
        ({"swarm": "x"}, {}),
        ({"swarm": '{"allowed":[50]}'}, {}),
        ({"swarm": '{"banned":[[]]}'}, {}),
        ({"swarm": '{"structure":"{\\"regex\\":\\"a\\"}"}'}, {}),
        ({"swarm": msgspec.json.encode({"structure": "[" * 20_000}).decode()}, {}),
        ({"swarm_asked": '{"prompt":0}'}, {}),
        ({"swarm_asked": '{"prompt":4}'}, {}),
        ({"swarm_asked": '{"prompt":3,"noise":[1,18446744073709551616]}'}, {}),
        ({"swarm_asked": '{"prompt":3,"claimed":[-1]}'}, {}),
        ({"swarm_asked": '{"prompt":3,"claimed":[1]}'}, {"return_logprob": False}),
        ({"swarm_asked": '{"prompt":3,"claimed":[1]}'}, {"logprob": Space(top_logprobs_num=2)}),
    ],
)
def test_a_request_that_asks_wrongly_ends_alone(plugin: Any, custom: Any, more: dict[str, Any]):
    running = plugin("running")
    one = request(custom, **more)
    running._read(SCHEDULER, one)
    assert len(one.why) == 1
    assert running.asked_of(one) is running.options_of(one) is None


def test_a_text_that_was_begun_under_other_weights_is_known(plugin: Any, monkeypatch: pytest.MonkeyPatch):
    running, requests = plugin("running"), plugin("requests")
    keys = itertools.count()
    monkeypatch.setattr(requests, "_scheduler", None)
    one = request({"swarm_asked": '{"prompt":3}'})
    running._read(SCHEDULER, one)
    requests.name_prefixes(f"0.{next(keys)}")
    running._remember(None, Space(reqs=[one]))
    assert not running.begun_otherwise(one)
    assert running.requests(1) == [one]
    assert running.requests(2) == ()
    requests.name_prefixes(f"0.{next(keys)}")
    running._remember(None, Space(reqs=[one]))
    assert running.begun_otherwise(one)
    running._remember(None, Space(reqs=[]))
