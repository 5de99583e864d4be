"""The GRPO loss: clipped importance ratios, advantages normalised in each group of samples of one prompt.

After "DeepSeekMath" (Shao et al. 2024, section 4.1) with three later changes that are common by now: no KL term, one
mean over all tokens of the batch instead of one per sample ("DAPO", Yu et al. 2025, section 3.3), and separate bounds
for ratios above and below 1 (there, section 3.1). Pure functions over tensors.
"""

from typing import Final, NamedTuple

import torch

__all__ = ["GrpoLoss", "group_advantages", "grpo_loss", "token_logprobs"]

SPREAD_FLOOR: Final = 1e-4
"""Added to a group's standard deviation: equal rewards teach nothing and must not divide by 0."""

LOG_RATIO_BOUND: Final = 10.0
"""Honest log-probabilities never differ so much. Beyond it the gradient is 0, so a node's lie cannot blow up a step."""


class GrpoLoss(NamedTuple):
    """`total`: the sum over tokens, to be divided by the batch's tokens. `clipped`: tokens whose gradient was cut."""

    total: torch.Tensor
    clipped: torch.Tensor


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(reward - mean) / (standard deviation + 1e-4) within each row. `rewards`: float, (groups, samples)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + SPREAD_FLOOR)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of each token under `logits / temperature`: float32, (rows, steps), differentiable.

    `logits`: (rows, steps, vocabulary), those that predicted `tokens`: int64, (rows, steps).
    """
    logprobs = torch.log_softmax(logits.float() / temperature, -1)
    return logprobs.gather(-1, tokens[..., None])[..., 0]


def grpo_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> GrpoLoss:
    """The loss summed over the tokens where `mask`: -min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A).

    `logprobs`, `old_logprobs`, `mask`: (rows, steps); the old ones are those of the version that sampled each token, so
    a completion that spans versions needs nothing more. `advantages`: (rows,). What lies outside the mask may be
    anything, infinities included.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    advantage = advantages[:, None]
    free, bounded = ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    total = -torch.where(mask, torch.minimum(free, bounded), 0.0).sum()
    return GrpoLoss(total, ((bounded < free) & mask).sum())
