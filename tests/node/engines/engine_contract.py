"""The contract of `node.engines.interface.Engine`, as tests that every engine runs.

A test class inherits from `EngineContract`, and from `AdapterContract` for an engine that serves adapters. It gives the
fixtures `subject` (an engine over a replica) and `detached` (an engine without one).
"""

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from codec import Replica, write_patch
from codec.adapter import AdapterConfig, AdapterModule, AdapterSlots
from codec.errors import PeerError
from node.engines.adapters import GivenAdapter
from node.engines.base import (
    ABILITIES,
    STREAMS,
    TOP_LOGPROBS,
    Completion,
    DrawnTokens,
    EngineError,
    Prompt,
    SamplingParams,
)
from node.engines.generation import (
    BackgroundGeneration,
    BatchGeneration,
    Generation,
    SteppedGeneration,
    generation_of,
)
from node.engines.interface import BackgroundEngine, Engine, ScoringEngine, SteppedEngine, WeightPatch
from node.engines.window import WINDOW_BYTES, places
from scenarios.engines.adapter_models import MadeAdapter, make_adapter
from scenarios.engines.engine_models import step_of

PROMPTS = [Prompt((3, 4, 5), 0), Prompt((6, 7), 1), Prompt((3, 4, 5), 2)]
SAMPLING = SamplingParams(max_tokens=6, seed=3)
WRONG_ROOT = b"\xff" * 32
NEAR = 0.15
"""Largest difference in nats between generating a token and scoring it, in bfloat16; 0.064 was measured on a CPU with
AMX."""


def _generate_told(engine: Engine, sampling: SamplingParams) -> tuple[list[list[DrawnTokens]], list[Completion]]:
    """What is told of each prompt, and the completions."""
    told: list[list[DrawnTokens]] = [[] for _ in PROMPTS]

    def tell(number: int, rows: list[tuple[int, DrawnTokens]]) -> None:
        assert number == 7
        for i, drawn in rows:
            told[i].append(drawn)

    if isinstance(engine, BackgroundEngine):
        ended: queue.Queue[list[Completion] | EngineError] = queue.Queue()
        engine.begin(7, PROMPTS, sampling, lambda _, outcome: ended.put(outcome), "", tell)
        outcome = ended.get(timeout=120)
    elif isinstance(engine, SteppedEngine):
        engine.begin(7, PROMPTS, sampling)
        while not (finished := engine.step()):
            tell(7, engine.new_tokens(7))
        outcome = finished[0][1]
        assert engine.new_tokens(7) == [], "it is no flight any more"
    else:
        outcome = engine.generate(PROMPTS, sampling)
    assert isinstance(outcome, list)
    return told, outcome


@dataclass
class Subject:
    """An attached engine, and the replica that it follows. `version`: the replica's."""

    engine: Engine
    replica: Replica
    version: int = 0

    @contextmanager
    def next_patch(self) -> Iterator[WeightPatch]:
        """Advance the replica to its next version, and give the patch that leads there."""
        staged = step_of(self.replica, self.version + 100, 0.2)
        fd, _ = write_patch(staged, self.replica.layout)
        self.replica.scatter(staged)
        self.version += 1
        try:
            yield WeightPatch(fd, (0, self.version))
        finally:
            os.close(fd)

    def update(self) -> float:
        with self.next_patch() as patch:
            self.engine.stage_patch(patch)
        return self.engine.commit((0, self.version), self.replica.root)

    def reload(self) -> bytes:
        return self.engine.reload_replica((0, self.version), self.replica.root)

    def adapter(self, name: str, seed: int = 0) -> MadeAdapter:
        """An adapter of one layer of the replica's model, of rank 2."""
        layout = self.replica.layout
        module = next(t.name for t in layout.tensors if t.name.endswith("q_proj.weight")).removesuffix(".weight")
        made = make_adapter(
            layout, AdapterSlots.reserve(layout, 3, 4), name, targets=("q_proj", "o_proj"), rank=2, seed=seed
        )
        assert AdapterModule(module, 2) in made.config.modules
        return made

    def set_adapter(self, adapter: MadeAdapter, slot: int, version: int) -> bytes:
        """Stage an adapter and switch to it. Returns the proven root."""
        with adapter.given(slot, (0, version)) as given:
            root = self.engine.stage_adapter(given)
        assert self.engine.switch_adapter(slot) >= 0
        return root


class EngineContract:
    """The tests of the contract; see the module."""

    def test_tokens_are_told_as_they_are_drawn(self, subject: Subject):
        """What is told of a completion is its beginning, each token once. An engine without the ability tells none."""
        engine, sampling = subject.engine, SamplingParams(max_tokens=24, seed=3)
        if TOP_LOGPROBS in engine.abilities:
            sampling = sampling.with_options(top_logprobs=3)
        told, completions = _generate_told(engine, sampling)
        if STREAMS not in engine.abilities:
            assert not any(told)
            return
        for pieces, completion in zip(told, completions, strict=True):
            assert pieces, "some tokens come before the end"
            assert [piece.start for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
            tokens = [token for piece in pieces for token in piece.token_ids]
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
            assert tuple(tokens) == completion.token_ids[: len(tokens)]
            assert tuple(logprobs) == completion.logprobs[: len(logprobs)]
            assert b"".join(piece.top for piece in pieces) == completion.top[: len(completion.top) // 24 * len(tokens)]
            assert {piece.version for piece in pieces} == {completion.spans[0].version}

    def test_a_reload_takes_every_bit_and_proves_it(self, subject: Subject) -> None:
        assert subject.reload() == subject.replica.root == subject.engine.live_root()
        assert subject.engine.version == (0, subject.version)
        assert subject.engine.root == subject.replica.root
        assert subject.engine.poisoned is None

    def test_a_reload_from_a_replica_that_moved_on_returns_its_root(self, subject: Subject) -> None:
        assert subject.engine.reload_replica((0, subject.version), WRONG_ROOT) == subject.replica.root
        assert subject.reload() == subject.replica.root

    def test_staging_changes_nothing_and_a_commit_everything(self, subject: Subject) -> None:
        before, version = subject.engine.live_root(), subject.engine.version
        with subject.next_patch() as patch:
            subject.engine.stage_patch(patch)
        assert subject.engine.live_root() == before
        assert subject.engine.version == version
        assert subject.engine.commit((0, subject.version), subject.replica.root) >= 0
        assert subject.engine.live_root() == subject.replica.root != before
        assert (subject.engine.version, subject.engine.root) == ((0, subject.version), subject.replica.root)

    def test_several_versions_follow_each_other(self, subject: Subject) -> None:
        for _ in range(3):
            subject.update()
            assert subject.engine.live_root() == subject.replica.root

    def test_each_prompt_gets_a_completion_of_the_live_version(self, subject: Subject) -> None:
        subject.update()
        completions = subject.engine.generate(PROMPTS, SAMPLING)
        assert len(completions) == len(PROMPTS)
        for completion in completions:
            assert 0 < len(completion.token_ids) <= SAMPLING.max_tokens
            assert {span.version for span in completion.spans} == {(0, subject.version)}

    def test_scores_are_the_log_probabilities_of_what_was_drawn(self, subject: Subject) -> None:
        engine = subject.engine
        if not isinstance(engine, ScoringEngine):
            pytest.skip("this engine does not score")
        for prompt, completion in zip(PROMPTS, engine.generate(PROMPTS, SAMPLING), strict=True):
            found = engine.score(prompt.token_ids, completion.token_ids, SAMPLING)
            np.testing.assert_allclose(found, completion.logprobs, atol=NEAR)

    def test_a_poisoned_engine_serves_nothing_until_it_is_reloaded(self, subject: Subject) -> None:
        subject.engine.poisoned = "poisoned by the test"
        with subject.next_patch() as patch, pytest.raises(EngineError):
            subject.engine.stage_patch(patch)
        with pytest.raises(EngineError):
            subject.engine.commit((0, subject.version), subject.replica.root)
        with pytest.raises(EngineError):
            subject.engine.generate(PROMPTS, SAMPLING)
        assert len(subject.engine.live_root()) == 32
        assert subject.reload() == subject.replica.root
        assert subject.engine.poisoned is None
        assert subject.engine.generate(PROMPTS, SAMPLING)

    def test_memory_that_is_no_patch_is_refused_and_changes_nothing(self, subject: Subject) -> None:
        fd = os.memfd_create("junk")
        os.write(fd, b"not a patch at all, but long enough to be one" * 4)
        with pytest.raises((PeerError, ValueError, EngineError)):
            subject.engine.stage_patch(WeightPatch(fd, (0, subject.version + 1)))
        os.close(fd)
        assert subject.engine.live_root() == subject.replica.root
        subject.update()

    def test_nothing_works_before_a_replica_is_attached(self, detached: Engine) -> None:
        with pytest.raises(EngineError, match="nothing is attached"):
            detached.reload_replica((0, 0), WRONG_ROOT)
        with pytest.raises(EngineError, match="nothing is attached"):
            detached.live_root()

    def test_blocks_are_read_back_bit_for_bit(self, subject: Subject) -> None:
        assert subject.engine.unreadable == ""
        window, layout = np.zeros(WINDOW_BYTES, np.uint8), subject.replica.layout
        for _ in range(2):
            subject.update()
            left = list(range(layout.n_blocks))
            while left:
                window[:] = 0xA5
                placed = list(places(layout, left))
                subject.engine.read_blocks([place.block for place in placed], window)
                for place in placed:
                    np.testing.assert_array_equal(place.view(window), subject.replica.block(place.block))
                left = left[len(placed) :]

    def test_it_declares_what_it_can_do(self, subject: Subject) -> None:
        named = {name for name in subject.engine.abilities if name.startswith("class:")}
        assert subject.engine.abilities - named <= ABILITIES
        assert len(named) < 2
        assert all(len(name) <= 64 for name in named)
        assert isinstance(subject.engine.kind, str)

    def test_the_process_drives_it_by_its_style(self, subject: Subject) -> None:
        styles: dict[type[Engine], type[Generation]] = {
            SteppedEngine: SteppedGeneration,
            BackgroundEngine: BackgroundGeneration,
        }
        wanted = next(
            (driver for style, driver in styles.items() if isinstance(subject.engine, style)), BatchGeneration
        )
        assert type(generation_of(subject.engine, lambda message: None)) is wanted


class AdapterContract:
    """What an engine that serves adapters promises. The fixture `subject` is as in `EngineContract`."""

    def test_an_adapter_changes_its_own_tokens_and_no_others(self, subject: Subject) -> None:
        engine, greedy = subject.engine, SamplingParams(max_tokens=6, temperature=0.0)
        versions = subject.version + 1, subject.version + 2
        base = [found.token_ids for found in engine.generate(PROMPTS, greedy)]
        first, other = subject.adapter("a"), subject.adapter("b", 1)
        assert subject.set_adapter(first, 0, versions[0]) == first.root(0) == engine.adapter_root(0)
        drawn = engine.generate(PROMPTS, greedy, "a")
        assert [found.token_ids for found in drawn] != base
        assert {span.version for found in drawn for span in found.spans} == {(0, versions[0])}
        assert engine.version_of("a") == (0, versions[0])
        subject.set_adapter(other, 1, versions[1])
        assert engine.generate(PROMPTS, greedy, "a") == drawn
        assert [found.token_ids for found in engine.generate(PROMPTS, greedy)] == base
        assert engine.live_root() == subject.replica.root
        engine.drop_adapter(0)
        engine.drop_adapter(1)

    def test_an_adapter_is_served_only_once_it_is_switched_to(self, subject: Subject) -> None:
        engine, version = subject.engine, subject.version + 1
        first = subject.adapter("a")
        with pytest.raises(EngineError):
            engine.generate(PROMPTS, SAMPLING, "a")
        with first.given(0, (0, version)) as given:
            assert engine.stage_adapter(given) == first.root(0)
        for call in (lambda: engine.generate(PROMPTS, SAMPLING, "a"), lambda: engine.adapter_root(0)):
            with pytest.raises(EngineError):
                call()
        engine.switch_adapter(0)
        with pytest.raises(EngineError):
            engine.switch_adapter(0)
        assert engine.adapter_root(0) == first.root(0)
        second = first.step(1, 0.5)
        with second.given(0, (0, version + 1)) as given, pytest.raises(EngineError):
            engine.stage_adapter(GivenAdapter(0, given.config, given.fd, given.version, first.root(0)))
        assert engine.adapter_root(0) == first.root(0)
        assert subject.set_adapter(second, 0, version + 1) == engine.adapter_root(0) == second.root(0)
        engine.drop_adapter(0)
        with pytest.raises(EngineError):
            engine.generate(PROMPTS, SAMPLING, "a")

    def test_adapters_outlive_commits_and_reloads_of_the_base(self, subject: Subject) -> None:
        engine, first = subject.engine, subject.adapter("a")
        subject.set_adapter(first, 2, subject.version + 1)
        subject.update()
        subject.update()
        assert engine.adapter_root(2) == first.root(2)
        drawn = engine.generate(PROMPTS, SAMPLING, "a")
        assert {span.version for found in drawn for span in found.spans} == {(0, subject.version)}
        subject.reload()
        assert engine.adapter_root(2) == first.root(2)
        assert engine.generate(PROMPTS, SAMPLING, "a") == drawn
        engine.drop_adapter(2)

    def test_what_is_no_adapter_of_this_base_is_refused(self, subject: Subject) -> None:
        made = subject.adapter("a")
        modules = (AdapterModule("no.such.layer", 2),)
        config = AdapterConfig("a", made.base.hash, 2, 4.0, modules, made.config.peft)
        strange = MadeAdapter(made.base, config, made.weights)
        with strange.given(0, (0, 9)) as given, pytest.raises((PeerError, EngineError)):
            subject.engine.stage_adapter(given)
        other = MadeAdapter(made.base, AdapterConfig("a", b"x" * 32, 2, 4.0, made.config.modules), made.weights)
        with other.given(0, (0, 9)) as given, pytest.raises((PeerError, EngineError)):
            subject.engine.stage_adapter(given)
        assert subject.engine.generate(PROMPTS, SAMPLING)
