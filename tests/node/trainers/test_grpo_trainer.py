from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from codec.checkpoint import Checkpoint, write_checkpoint
from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.engines.base import Completion, SamplingParams, Span
from node.engines.transformers import TransformersEngine
from node.trainers.grpo.loop import sample, train_in_process
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer, SampleGroup

ONE_TOKEN = Span((0, 0), 0, 1)
CONFIG = GrpoConfig(lr=1e-4, lr_warmup_steps=1, prompts=4, samples=4)


class CountSmall:
    """Share of the answer's letters before `m`: random policies get some of it, so every step has a gradient."""

    max_tokens = 4
    stop_tokens = (SortLetters.END,)

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
        return [(*row, SortLetters.ASK) for row in rng.integers(0, 26, (count, 2 + step % 2)).tolist()]

    def score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
        return sum(token < 13 for token in answer) / len(answer)


def trainer_on(base: Path, seed: int = 0, **config) -> GrpoTrainer:
    return GrpoTrainer(base, CountSmall(), msgspec.structs.replace(CONFIG, **config), seed=seed, device="cpu")


def engine_on(base: Path, arithmetic="float32") -> TransformersEngine:
    engine = TransformersEngine(threads=1, device="cpu", arithmetic=arithmetic)
    engine.load(base)
    engine.attach(Checkpoint.open(base).layout)
    return engine


def bits_of(trainer: GrpoTrainer) -> dict[str, np.ndarray]:
    return {name: bits.copy() for name, bits in trainer.policy_bits()}


def test_policy_bits_are_the_checkpoints(base, tmp_path):
    trainer = trainer_on(base)
    stored = Checkpoint.open(base)
    bits = bits_of(trainer)
    assert sorted(bits) == list(stored.names)
    assert "lm_head.weight" not in bits  # tied: once
    trainer.step(sample(trainer, engine_on(base)))
    assert any((new != bits[name]).any() for name, new in trainer.policy_bits())
    trainer.save(tmp_path / "saved")
    saved = Checkpoint.open(tmp_path / "saved")
    assert saved.layout.hash == stored.layout.hash  # config and tokenizer too
    for name, new in trainer.policy_bits():
        np.testing.assert_array_equal(saved.bits(name), new)
    again = trainer_on(tmp_path / "saved")
    for (name, old), (_, new) in zip(trainer.policy_bits(), again.policy_bits(), strict=True):
        np.testing.assert_array_equal(old, new, err_msg=name)


def test_tiny_comes_with_its_tokenizer(base):
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    assert tokenizer.encode("dbca>") == [3, 1, 2, 0, SortLetters.ASK]
    assert tokenizer.decode([0, 1, 2, 3, SortLetters.END], skip_special_tokens=True) == "abcd"


def test_a_base_that_is_not_bf16_is_refused(base, tmp_path):
    stored = Checkpoint.open(base)
    wide = Layout(tuple(TensorSpec(t.name, "F32", t.shape) for t in stored.layout.tensors))
    files = {name: data for name, data in stored.files.items() if name == "config.json"}
    write_checkpoint(tmp_path / "wide", wide, lambda name: stored.bits(name).astype(np.uint32) << np.uint32(16), files)
    with pytest.raises(UsageError, match="bf16"):
        trainer_on(tmp_path / "wide")
    with pytest.raises(UsageError, match=r"config\.json"):
        trainer_on(tmp_path)


def test_density_counts_changed_bits(base):
    trainer = trainer_on(base)
    old = bits_of(trainer)
    stats = trainer.step(sample(trainer, engine_on(base)))
    new = bits_of(trainer)
    changed = sum(int((new[name] != old[name]).sum()) for name in old)
    assert changed > 0
    assert stats.density == changed / sum(b.size for b in old.values())


def test_the_loop_moves_every_bit_and_repeats_itself(base):
    def run(seed: int):
        trainer, engine = trainer_on(base, seed), TransformersEngine(threads=1, device="cpu")
        stats = list(train_in_process(trainer, engine, base, 3))
        layout = Checkpoint.open(base).layout
        fresh = engine_on(base)
        bits = bits_of(trainer)
        fresh.reload(lambda name: bits[name], (0, 3), b"")
        np.testing.assert_array_equal(engine.live_hashes(layout), fresh.live_hashes(layout))
        assert engine.version == (0, 3)
        return bits, [(s.train.reward, s.train.loss, s.train.grad_norm, s.changed) for s in stats]

    bits, stats = run(0)
    again, same = run(0)
    _, other = run(1)
    assert stats == same
    assert stats != other
    for name, value in bits.items():
        np.testing.assert_array_equal(value, again[name])


@pytest.mark.parametrize(("arithmetic", "tolerance"), [("float32", 2e-5), ("bfloat16", 0.05)])
def test_trainer_and_engine_agree_on_logprobs(base, arithmetic, tolerance):
    """The stated tolerance: 2e-5 when the engine computes in float32 as the trainer does, 0.05 when in bfloat16."""
    trainer, engine = trainer_on(base, rows=5), engine_on(base, arithmetic)
    groups = sample(trainer, engine)
    rows = [(g.prompt, c) for g in groups for c in g.completions]
    rows += [((1, 2, 3, 4, 26), c) for c in sample_for(engine, (1, 2, 3, 4, 26))]  # unequal lengths: padding
    batch = trainer._pad(rows)
    with torch.no_grad():
        logits = trainer.model(input_ids=batch.ids, use_cache=False).logits[:, batch.first - 1 : -1]
    got = torch.log_softmax(logits, -1).gather(-1, batch.ids[:, batch.first :, None])[..., 0]
    worst = (got - batch.old_logprobs)[batch.mask].abs().max().item()
    assert worst < tolerance
    assert batch.mask.sum().item() == sum(len(c.token_ids) for _, c in rows)


def sample_for(engine: TransformersEngine, prompt: tuple[int, ...]) -> list[Completion]:
    from node.engines.base import Prompt

    return engine.generate([Prompt(prompt, i) for i in range(3)], SamplingParams(5, stop_tokens=(27,)))


def test_fresh_samples_are_not_clipped_and_stale_ones_are(base):
    trainer, engine = trainer_on(base), engine_on(base)
    groups = sample(trainer, engine)
    assert trainer.step(groups).clipped == 0
    stale = [SampleGroup(g.prompt, tuple(unlikely(c) for c in g.completions)) for g in groups]
    assert trainer.step(stale).clipped > 0.2


def unlikely(completion: Completion) -> Completion:
    """As if the version that sampled it had found each token e^2 times less likely."""
    return msgspec.structs.replace(completion, logprobs=tuple(p - 2 for p in completion.logprobs))


def test_micro_batches_change_nothing_but_rounding(base):
    groups = sample(trainer_on(base), engine_on(base))
    whole, parts = trainer_on(base, rows=16), trainer_on(base, rows=3)
    a, b = whole.step(groups), parts.step(groups)
    assert a.loss == pytest.approx(b.loss, abs=1e-6)
    assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)


def test_a_refused_step_changes_nothing(base):
    trainer = trainer_on(base)
    groups = sample(trainer, engine_on(base))
    old = bits_of(trainer)
    strange = msgspec.structs.replace(groups[0].completions[0], token_ids=(32,), logprobs=(-1.0,), spans=(ONE_TOKEN,))
    for wrong in ([], [SampleGroup((1, 26), ())], [*groups, SampleGroup((1, 26), (strange,))]):
        with pytest.raises(ValueError, match="step"):
            trainer.step(wrong)
    assert trainer.step_done == 0
    for name, bits in trainer.policy_bits():
        np.testing.assert_array_equal(bits, old[name])


def test_groups_of_equal_rewards_change_nothing(base):
    trainer = trainer_on(base)
    trainer.task.score = lambda prompt, answer: 1.0  # type: ignore[method-assign]
    stats = trainer.step(sample(trainer, engine_on(base)))
    assert (stats.reward, stats.density, stats.grad_norm) == (1.0, 0.0, 0.0)


def test_rewards_rise(base):
    trainer, engine = trainer_on(base, lr=3e-4, prompts=8, samples=8), TransformersEngine(threads=1, device="cpu")
    rewards = [stats.train.reward for stats in train_in_process(trainer, engine, base, 20)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.1


def test_prompts_and_sampling_follow_seed_and_step(base):
    a, b = trainer_on(base, 0), trainer_on(base, 1)
    assert a.prompts(5) == a.prompts(5) != a.prompts(7)
    assert a.prompts(5) != b.prompts(5)
    assert len({a.sampling(5).seed, a.sampling(6).seed, b.sampling(5).seed}) == 3
    assert a.sampling(5) == a.sampling(5)
    streams = [p.stream for i, prompt in enumerate(a.prompts(1)) for p in a.samples(i, prompt)]
    assert sorted(streams) == list(range(16))


def test_sort_letters_scores_exactly_the_sorted_word():
    task = SortLetters(4)
    prompt = task.prompts(1, 3, np.random.default_rng(0))[0]
    assert len(prompt) == 5
    assert prompt[-1] == SortLetters.ASK
    right = (*sorted(prompt[:-1]), SortLetters.END)
    assert task.score(prompt, right) == 1.0
    assert len(right) == task.max_tokens
    assert task.score(prompt, right[:-1]) == 0.0
    assert task.score(prompt, task.backwards(prompt)) == 0.0
    assert task.score(prompt, (*right, 0)) == 0.0
