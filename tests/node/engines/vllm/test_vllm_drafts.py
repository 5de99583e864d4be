"""A real vLLM that proposes tokens by the swarm's draft model: both models take versions in place, in one commit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec import Checkpoint, Replica, write_checkpoint
from codec.parts import base_layout, draft_blocks, draft_layout, draft_name
from node.engines.base import ABILITIES, EngineError, Prompt, SamplingParams
from node.engines.vllm.speculation import Drafts, drafts_of
from scenarios.engines.engine_bench import Bench, bench
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

PROMPTS = [list(range(3 + i, 40 + i)) for i in range(4)]
TOKENS = 48


def near(target: Path, folder: Path) -> Path:
    """A draft that is like its target: half of its elements have another lowest bit."""
    checkpoint = Checkpoint.open(target)
    replica = Replica.from_checkpoint(checkpoint)
    replica.scatter(step_of(replica, 99, 0.5))
    write_checkpoint(folder, replica.layout, replica.bits, checkpoint.files)
    return folder


@pytest.fixture(scope="module")
def draft(untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return near(untied, tmp_path_factory.mktemp("drafts") / "draft")


@pytest.fixture(scope="module")
def drafted(untied: Path, draft: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(untied, tmp_path_factory.mktemp("drafted"), python, threads=1, draft=draft) as live:
        yield live


def measured(live: Bench) -> tuple[float, list[Any]]:
    """(acceptance length, greedy tokens of each prompt), one prompt at a time."""
    before = drafts_of(live.url)
    tokens = [ids for ids, _ in live.greedy(PROMPTS, TOKENS)]
    after = drafts_of(live.url)
    acceptance = Drafts(after.steps - before.steps, after.accepted - before.accepted).acceptance
    assert acceptance is not None
    return acceptance, tokens


def saved(live: Bench, folder: Path) -> tuple[Path, Path]:
    """The folders of the target and of the draft at the present version."""
    layout, bits = live.replica.layout, live.replica.bits
    write_checkpoint(folder / "target", base_layout(layout), bits, live.checkpoint.files)
    own = draft_layout(layout)
    assert own is not None
    files = {spec.name: b"" for spec in own.files} | live.checkpoint.files
    write_checkpoint(folder / "draft", own, lambda name: bits(draft_name(name)), files)
    return folder / "target", folder / "draft"


def test_both_models_take_versions_in_one_commit(drafted: Bench, python: Path, tmp_path: Path) -> None:
    live = drafted
    assert live.engine.classes.loaded == {}
    first = measured(live)
    assert first[0] > 1.5, "the draft is near its target"
    for _ in range(4):
        assert live.update(step_of(live.replica, live.version, 0.02)) > 0
        assert (live.engine.live_hashes() == live.replica.hashes).all()
        assert live.engine.live_root() == live.replica.root
    after = measured(live)
    assert after[1] != first[1]
    target, draft = saved(live, tmp_path)
    with bench(target, tmp_path / "fresh", python, threads=1, draft=draft) as fresh:
        assert measured(fresh) == after


def test_a_version_of_the_draft_alone_changes_no_token(drafted: Bench) -> None:
    live = drafted
    before = measured(live)
    names = [spec.name for spec in live.replica.layout.tensors[len(base_layout(live.replica.layout).tensors) :]]
    live.update(step_of(live.replica, 7, 0.9, names=names))
    assert (live.engine.live_hashes() == live.replica.hashes).all()
    after = measured(live)
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
    assert draft_blocks(drafted.replica.layout)


def test_samples_have_the_log_probabilities_of_the_target(drafted: Bench) -> None:
    live = drafted
    sampling = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.9)
    completions = live.generate([Prompt(tuple(prompt), i) for i, prompt in enumerate(PROMPTS)], sampling)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == 32
        scores = live.score(prompt, completion.token_ids, sampling)
        np.testing.assert_allclose(scores, completion.logprobs, atol=0.06)
