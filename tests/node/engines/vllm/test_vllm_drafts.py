"""A real vLLM that proposes tokens by the swarm's draft model: both models take versions in place, in one commit."""

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec.parts import DRAFT, part_of
from node.engines.base import ABILITIES, STREAMS, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.vllm.speculation import drafts_of
from node.verification.classes import ArithmeticClass
from scenarios.engines.drafts import measured, models_of, near, saved
from scenarios.engines.engine_bench import WITHIN_S, Bench, bench
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

PROMPTS, TOKENS = 4, 48
HOWS = [
    SamplingParams(32, temperature=0.0),
    SamplingParams(32, temperature=1.0),
    SamplingParams(32, temperature=0.8, top_p=0.9),
    SamplingParams(32, temperature=1.3, options=SamplingOptions(top_k=5)),
]
DRAWS = 3000


@pytest.fixture(scope="module")
def draft(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return near(untied, tmp_path_factory.mktemp("drafts") / "draft")


@pytest.fixture(scope="module")
def drafted(untied: Path, draft: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(untied, tmp_path_factory.mktemp("drafted"), python, threads=1, draft=draft) as live:
        yield live


@pytest.mark.long
def test_both_models_take_versions_in_one_commit(drafted: Bench, draft: Path, python: Path, tmp_path: Path) -> None:
    live = drafted
    assert live.engine.classes.loaded == {}
    first = measured(live, PROMPTS, TOKENS)
    assert first[0] > 1.5, "the draft is near its target"
    for _ in range(4):
        assert live.update(step_of(live.replica, live.version, 0.02)) > 0
        assert (live.engine.live_hashes() == live.replica.hashes).all()
        assert live.engine.live_root() == live.replica.root
    after = measured(live, PROMPTS, TOKENS)
    assert after[1] != first[1]
    target, last = saved(live, draft, tmp_path)
    with bench(target, tmp_path / "fresh", python, threads=1, draft=last) as fresh:
        assert measured(fresh, PROMPTS, TOKENS) == after


def test_a_version_of_the_draft_alone_changes_no_token(drafted: Bench) -> None:
    live = drafted
    before = measured(live, PROMPTS, TOKENS)
    names = [spec.name for spec in live.replica.layout.tensors if part_of(spec.name) == DRAFT]
    live.update(step_of(live.replica, 7, 0.9, names=names))
    assert (live.engine.live_hashes() == live.replica.hashes).all()
    after = measured(live, PROMPTS, TOKENS)
    assert after[1] == before[1], "greedy tokens are the target's"
    assert after[0] != before[0]


def test_bits_of_the_draft_are_proven(drafted: Bench) -> None:
    """A version is refused whose draft does not lead to the root."""
    live = drafted
    staged = step_of(live.replica, 8, 0.01)
    live.stage(staged)
    with pytest.raises(EngineError, match="something else"):
        live.engine.commit((0, live.version), bytes(32))
    live.reload()
    assert (live.engine.live_hashes() == live.replica.hashes).all()


def test_it_claims_only_what_it_can_do(drafted: Bench) -> None:
    """vLLM's rejection sampler draws by random numbers of its own."""
    found = drafted.engine.abilities
    assert found & ABILITIES <= {STREAMS}
    assert "draft" in ArithmeticClass.named(found, "").attention


@pytest.mark.parametrize("how", HOWS)
def test_samples_have_the_log_probabilities_of_the_target(drafted: Bench, how: SamplingParams) -> None:
    live = drafted
    prompts = [Prompt(tuple(range(3 + i, 40 + i)), i) for i in range(4)]
    beside = live.begin(prompts, HOWS[0])  # in the same steps: greedy requests have a temperature of 0
    completions = live.generate(prompts, how)
    for sampling, found in ((how, completions), (HOWS[0], beside.result(WITHIN_S))):
        for prompt, completion in zip(prompts, found, strict=True):
            assert len(completion.token_ids) == len(completion.logprobs) == 32
            scores = live.score(prompt.token_ids, completion.token_ids, sampling)
            np.testing.assert_allclose(scores, completion.logprobs, atol=0.06)


@pytest.mark.long
@pytest.mark.parametrize("how", [{"options": SamplingOptions(top_k=3)}, {"temperature": 0.6, "top_p": 0.3}])
def test_draws_follow_the_distribution_of_the_target(drafted: Bench, how: dict[str, Any]) -> None:
    """Three tokens, by vLLM's scores of each sequence of three that was drawn: it is one of few."""
    live, sampling = drafted, SamplingParams(5, seed=11, **how)
    text = tuple(range(5, 30))
    before = drafts_of(live.url)
    parts = [range(at, at + 500) for at in range(0, DRAWS, 500)]  # each in time on a busy machine
    drawn = [one for part in parts for one in live.generate([Prompt(text, stream) for stream in part], sampling)]
    after = drafts_of(live.url)
    assert 0.1 < (after.accepted - before.accepted) / (after.steps - before.steps) < 2.9, "some were proposed rightly"
    counts = Counter(completion.token_ids[:3] for completion in drawn)
    shares = {ids: math.exp(sum(live.score(text, ids, sampling))) for ids in counts}
    assert 0.995 < sum(shares.values()) < 1.005, "no sequence is missing"
    usual = [ids for ids, share in shares.items() if share * DRAWS >= 5]
    assert len(usual) > 8
    distance = sum((counts[ids] - shares[ids] * DRAWS) ** 2 / (shares[ids] * DRAWS) for ids in usual)
    assert distance < len(usual) + 4 * math.sqrt(2 * len(usual)), "chi-squared, 4 standard deviations above its mean"


@pytest.mark.long
def test_an_eagle_head_without_an_embedding_of_its_own(python: Path, tmp_path: Path) -> None:
    """It shares the target's, which a version of the target changes for both."""
    target, draft = models_of("eagle", tmp_path)
    with bench(target, tmp_path / "live", python, threads=1, draft=draft) as live:
        for number in range(3):
            live.update(step_of(live.replica, number, 0.02))
            assert (live.engine.live_hashes() == live.replica.hashes).all()
        after = measured(live, PROMPTS, TOKENS)
        last = saved(live, draft, tmp_path / "last")
    with bench(last[0], tmp_path / "fresh", python, threads=1, draft=last[1]) as fresh:
        assert measured(fresh, PROMPTS, TOKENS) == after
