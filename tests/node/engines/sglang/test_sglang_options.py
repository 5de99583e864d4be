"""A real SGLang draws by `SamplingOptions` like the transformers engine: the effects and the log-probabilities."""

from pathlib import Path
from typing import Any

import pytest
from options_kit import OPTIONS, PROMPT, WITHIN, check_allowed, check_stop_text, draw, largest_difference
from options_kit import transformers_engine as engine_of

from node.engines.base import OPTIONS as ABILITY
from node.engines.base import Prompt, SamplingOptions, SamplingParams

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def other(model: Path) -> Any:
    return engine_of(model)


@pytest.mark.parametrize(
    "how", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_p": 0.9}]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_log_probabilities_are_those_of_the_distribution_that_the_options_leave(
    one, other, name: str, how: dict[str, float]
):
    completion, sampling = draw(one, OPTIONS[name], **how)
    scores = other.score(PROMPT, completion.token_ids, sampling)
    assert largest_difference(completion.logprobs, scores) <= WITHIN / min(1, how["temperature"] or 1)


def test_every_token_is_allowed_by_the_options(one):
    check_allowed(one)


def test_no_token_is_drawn_after_a_stop_text(one, other):
    check_stop_text(one, other)


def test_options_of_one_request_change_no_other(one):
    plain = SamplingParams(max_tokens=12, temperature=0.8, seed=11)
    (alone,) = one.generate([Prompt(PROMPT, 3)], plain)
    biased = SamplingParams(60, seed=5, options=SamplingOptions(logit_bias=((70, 50.0),), presence_penalty=1.0))
    beside = one.begin([Prompt(PROMPT, i) for i in range(3)], biased)
    (again,) = one.generate([Prompt(PROMPT, 3)], plain)
    assert again.token_ids[:4] == alone.token_ids[:4]  # rounding may differ between batches of different sizes
    assert all(one.token_ids.count(70) > 50 for one in beside.result(300.0))


def test_a_node_that_starts_it_names_the_ability(python: Path, tmp_path: Path):
    from node.engines.sglang.installed import installed
    from node.engines.sglang.launch import RunningSglang, StartedSglang
    from node.engines.sglang.server import ServerOptions

    started = StartedSglang(installed(python), tmp_path / "log", ServerOptions(0))
    assert ABILITY in started.abilities
    assert not RunningSglang("http://127.0.0.1:1").abilities, "nobody knows its plugin"
