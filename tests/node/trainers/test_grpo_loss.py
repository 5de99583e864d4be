import math
import random

import pytest
import torch

from node.trainers.grpo.loss import group_advantages, grpo_loss, token_logprobs


def slow_loss(new, old, advantages, mask, low, high):
    """The formula as in the papers, one token at a time."""
    total, clipped = 0.0, 0
    for i, row in enumerate(mask):
        for t, counts in enumerate(row):
            if not counts:
                continue
            ratio = math.exp(new[i][t] - old[i][t])
            bounded = min(max(ratio, 1 - low), 1 + high)
            objective = min(ratio * advantages[i], bounded * advantages[i])
            clipped += bounded * advantages[i] < ratio * advantages[i]
            total -= objective
    return total, clipped


def test_loss_and_gradient_equal_the_slow_reference():
    rng = random.Random(0)
    rows, steps = 6, 5
    new = [[rng.gauss(-1, 0.5) for _ in range(steps)] for _ in range(rows)]
    old = [[rng.gauss(-1, 0.5) for _ in range(steps)] for _ in range(rows)]
    advantages = [rng.gauss(0, 1) for _ in range(rows)]
    mask = [[rng.random() < 0.7 for _ in range(steps)] for _ in range(rows)]
    logprobs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss = grpo_loss(
        logprobs,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(mask),
        clip_low=0.2,
        clip_high=0.3,
    )
    total, clipped = slow_loss(new, old, advantages, mask, 0.2, 0.3)
    assert 0 < clipped < sum(map(sum, mask))
    assert loss.total.item() == pytest.approx(total, rel=1e-12)
    assert loss.clipped.item() == clipped
    loss.total.backward()
    for i in range(rows):
        for t in range(steps):
            bumped = [list(row) for row in new]
            bumped[i][t] += 1e-6
            slope = (slow_loss(bumped, old, advantages, mask, 0.2, 0.3)[0] - total) / 1e-6
            assert logprobs.grad is not None
            assert logprobs.grad[i, t].item() == pytest.approx(slope, abs=1e-5)


def test_values_outside_the_mask_are_ignored():
    new = torch.tensor([[0.0, float("-inf"), float("nan")]], requires_grad=True)
    old = torch.tensor([[0.0, float("-inf"), 0.0]])
    loss = grpo_loss(new, old, torch.tensor([2.0]), torch.tensor([[True, False, False]]), clip_low=0.2, clip_high=0.2)
    loss.total.backward()
    assert loss.total.item() == -2.0
    assert new.grad is not None
    assert new.grad.tolist() == [[-2.0, 0.0, 0.0]]


@pytest.mark.parametrize("lie", [-1e30, -500.0, 500.0])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_an_absurd_log_probability_has_no_gradient(lie, advantage):
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-1.0, lie]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    grpo_loss(new, old, torch.tensor([advantage]), mask, clip_low=0.2, clip_high=0.2).total.backward()
    assert new.grad is not None
    assert new.grad.tolist() == [[-advantage, 0.0]]


def test_advantages_are_normalised_in_each_group():
    rewards = torch.tensor([[0.0, 1.0, 1.0, 0.0], [5.0, 5.0, 5.0, 5.0], [1.0, 0.0, 0.0, 0.0]])
    advantages = group_advantages(rewards)
    torch.testing.assert_close(advantages[0], torch.tensor([-1.0, 1.0, 1.0, -1.0]), atol=1e-3, rtol=0)
    assert advantages[1].tolist() == [0.0] * 4
    torch.testing.assert_close(advantages.mean(-1), torch.zeros(3), atol=1e-6, rtol=0)
    assert advantages[2, 0] > 1.7


def test_token_logprobs_are_tempered():
    logits = torch.tensor([[[0.0, 2.0], [1.0, 1.0]]])
    got = token_logprobs(logits, torch.tensor([[1, 0]]), 2.0)
    torch.testing.assert_close(got, torch.tensor([[-math.log(1 + math.exp(-1.0)), -math.log(2.0)]]))
