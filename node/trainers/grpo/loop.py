"""The whole RL loop in one process: what a swarm does over a network, without it.

The engine gets its weights as a node's does, by patches of changed bits, never by sharing tensors with the trainer.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from codec.checkpoint import Checkpoint
from node.engines.interface import Engine, InProcessEngine
from node.trainers.grpo.trainer import Group, GrpoTrainer, StepStats

__all__ = ["LoopStats", "train_in_process"]


class LoopStats(msgspec.Struct, frozen=True):
    """One turn of the loop. `sample_s`: generating; `move_s`: diff, stage and commit; `pause_s`: the commit alone."""

    train: StepStats
    sample_s: float
    move_s: float
    pause_s: float
    changed: int
    """bf16 elements whose bits changed."""

    @property
    def seconds(self) -> float:
        return self.sample_s + self.train.seconds + self.move_s


def train_in_process(trainer: GrpoTrainer, engine: InProcessEngine, base: Path, steps: int) -> Iterator[LoopStats]:
    """Load `base` into the engine and run `steps` turns: sample, step, move the bits. Yields after each commit."""
    engine.load(base)
    engine.attach(Checkpoint.open(base).layout)
    held = {name: bits.copy() for name, bits in trainer.policy_bits()}
    for _ in range(steps):
        started = time.perf_counter()
        groups = sample(trainer, engine)
        sampled = time.perf_counter()
        stats = trainer.step(groups)
        stepped = time.perf_counter()
        patch = list(_changes(held, trainer))
        engine.stage(patch)
        pause_s = engine.commit((0, stats.step), b"")
        yield LoopStats(
            train=stats,
            sample_s=sampled - started,
            move_s=time.perf_counter() - stepped,
            pause_s=pause_s,
            changed=sum(len(indices) for _, indices, _ in patch),
        )


def sample(trainer: GrpoTrainer, engine: Engine) -> list[Group]:
    """All groups of the trainer's next step, from one engine."""
    step = trainer.step_done + 1
    prompts = trainer.prompts(step)
    asked = [trainer.samples(i, prompt) for i, prompt in enumerate(prompts)]
    answers = iter(engine.generate([one for group in asked for one in group], trainer.sampling(step)))
    return [Group(prompt, tuple(next(answers) for _ in group)) for prompt, group in zip(prompts, asked, strict=True)]


def _changes(
    held: dict[str, NDArray[np.uint16]], trainer: GrpoTrainer
) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.uint16]]]:
    """The patch from `held` to the trainer's policy; `held` becomes the policy."""
    for name, bits in trainer.policy_bits():
        indices = np.flatnonzero(bits != held[name])
        held[name][indices] = bits[indices]
        yield name, indices, bits[indices]
