"""`tiny` learns its task; about two minutes on one core."""

from pathlib import Path

import numpy as np
import pytest

from node.engines.transformers import TransformersEngine
from node.trainers.grpo import make_trainer
from node.trainers.grpo.loop import train_in_process


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tiny_learns_while_few_bits_change(seed: int, tmp_path_factory: pytest.TempPathFactory, monkeypatch):
    """Reward rises by at least 0.2 over 50 steps, and no step changes 10 % of the bf16 elements."""
    # One cache for the three seeds, so that `tiny` is made once, by the code under test.
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    engine = TransformersEngine(threads=1, device="cpu")
    base, trainer = make_trainer("tiny", seed=seed, lr=None, progress=print, device="cpu")
    assert isinstance(base, Path)
    stats = [s.train for s in train_in_process(trainer, engine, base, 50)]
    rewards = [s.reward for s in stats]
    print(f"seed {seed}: {np.mean(rewards[:10]):.3f} -> {np.mean(rewards[-10:]):.3f}")
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.2
    assert max(s.density for s in stats) < 0.10
