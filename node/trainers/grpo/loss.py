"""The GRPO loss: clipped importance ratios, and advantages normalised within each group of samples of one prompt.

After "DeepSeekMath" (Shao et al. 2024, arXiv:2402.03300, section 4.1), with three changes that are common today: no KL
term; one mean over all tokens of the batch instead of one a sample ("DAPO", Yu et al. 2025, arXiv:2503.14476, section
3.3); and separate clip bounds for ratios above and below 1 (DAPO, section 3.1). Pure functions over tensors.
"""

from typing import Final, NamedTuple

import torch

__all__ = ["GrpoLoss", "group_advantages", "grpo_loss", "token_logprobs"]

SPREAD_FLOOR: Final = 1e-4
"""Added to a group's standard deviation, so that a group of equal rewards has advantage 0 and no division by 0."""

LOG_RATIO_BOUND: Final = 10.0
"""Bound of |log ratio|, in nats. Honest log-probabilities never differ so much. Beyond it the gradient is 0, so false
log-probabilities of a node cannot blow up a step."""


class GrpoLoss(NamedTuple):
    """`total`: the loss summed over tokens, not yet averaged. `clipped`: how many tokens' ratio was clipped."""

    total: torch.Tensor
    clipped: torch.Tensor


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(reward - mean) / (standard deviation + 1e-4) within each row. Takes and returns float, (groups, samples)."""
    centred = rewards - rewards.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + SPREAD_FLOOR)


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probability of each token under `logits / temperature`: float32, (rows, steps), differentiable.

    `logits`: (rows, steps, vocabulary), those that predict `tokens`: int64, (rows, steps).
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
    """-min(ratio * A, clamp(ratio, 1 - clip_low, 1 + clip_high) * A), summed over the tokens where `mask` is true.

    `logprobs`, `old_logprobs`: float, (rows, steps); `mask`: bool, (rows, steps); `advantages` (A): float, (rows,). The
    old log-probabilities are those of the version that sampled each token, so a completion that spans versions needs no
    special case. Values outside the mask may be anything, infinities included.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND))
    advantage = advantages[:, None]
    free, bounded = ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    total = -torch.where(mask, torch.minimum(free, bounded), 0.0).sum()
    return GrpoLoss(total, ((bounded < free) & mask).sum())
