"""A real vLLM that proposes tokens by the swarm's draft model: both models take versions in place, in one commit."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from codec.parts import DRAFT, part_of
from node.engines.base import ABILITIES, EngineError, Prompt, SamplingParams
from scenarios.engines.drafts import measured, models_of, near, saved
from scenarios.engines.engine_bench import Bench, bench
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

PROMPTS, TOKENS = 4, 48


@pytest.fixture(scope="module")
def draft(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return near(untied, tmp_path_factory.mktemp("drafts") / "draft")


@pytest.fixture(scope="module")
def drafted(untied: Path, draft: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(untied, tmp_path_factory.mktemp("drafted"), python, threads=1, draft=draft) as live:
        yield live


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
    assert not found & ABILITIES
    assert any("drafts-" in ability for ability in found)


def test_samples_have_the_log_probabilities_of_the_target(drafted: Bench) -> None:
    live = drafted
    sampling = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9)
    prompts = [list(range(3 + i, 40 + i)) for i in range(4)]
    completions = live.generate([Prompt(tuple(prompt), i) for i, prompt in enumerate(prompts)], sampling)
    for prompt, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == 32
        scores = live.score(prompt, completion.token_ids, sampling)
        np.testing.assert_allclose(scores, completion.logprobs, atol=0.06)


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
