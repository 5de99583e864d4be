"""Importance weights: how likely the weights that you train draw what older versions drew.

A rollout's tokens were drawn from the versions in its spans, and `Rollout.logprobs` are their log-probabilities there.
With log pi(t), the log-probability of token t under the weights being trained, and log mu(t), the rollout's own:

    ratio(t)  = exp(log pi(t) - log mu(t))
    weight(t) = min(ratio(t), bound)                       truncated importance sampling (Ionides 2008, equation 3)

Ionides 2008: "Truncated Importance Sampling", Journal of Computational and Graphical Statistics 17(2). Truncation
bounds the variance at the price of a small bias. For sequences the ratio is the product over all tokens. Works on numpy
arrays and on torch tensors, and keeps their kind, device and gradient.
"""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from codec.errors import UsageError
from node.engines.base import Version
from node.trainers.rollout_group import Rollout

__all__ = ["effective_share", "importance_weights", "log_ratios_by_version"]

LONGEST: Final = 80.0
"""Bound of a log ratio before `exp`, in nats: e^80 is below the largest float32, and far beyond any `bound`."""


def importance_weights(new: Any, old: Any, *, bound: float = 2.0, mask: Any = None, of: str = "token") -> Any:
    """Truncated importance weights, shape of `new`.

    `new`: log pi, float, shape (..., tokens), in nats: of the weights being trained, with the sampling's temperature.
    `old`: log mu, the same shape: `Rollout.logprobs`, padded as `new` is. Both numpy arrays or both torch tensors.
    `bound`: the largest weight, above 0. `mask`: bool, the same shape; tokens that count. The weights of others are 0.
    `of`: "token": each token has the ratio of itself; "sequence": all tokens of the last dimension have the product of
    their ratios.

    Gradients flow through the weights of torch tensors; detach `new` for weights that are constants of the loss.

    Raises `UsageError` when the shapes differ, `bound` is not above 0, or `of` is neither.
    """
    if tuple(new.shape) != tuple(old.shape) or (mask is not None and tuple(mask.shape) != tuple(new.shape)):
        raise UsageError(f"importance_weights: shapes {tuple(new.shape)} and {tuple(old.shape)} differ, or the mask's.")
    if not bound > 0.0:
        raise UsageError("importance_weights: bound is above 0.")
    if of not in ("token", "sequence"):
        raise UsageError('importance_weights: of is "token" or "sequence".')
    # A token that does not count may have -inf on both sides, whose difference is no number.
    log_ratio = new - old if mask is None else _where(mask, new, 0.0) - _where(mask, old, 0.0)
    if of == "sequence":
        log_ratio = _broadcast(log_ratio.sum(-1)[..., None], new)
    top = min(math.log(bound), LONGEST)
    weights = _exp(log_ratio.clip(-LONGEST, top))
    return weights if mask is None else _where(mask, weights, 0.0)


def effective_share(weights: Any, mask: Any = None) -> float:
    """The effective sample size as a share of the samples, 0 to 1: (sum w)^2 / (n * sum w^2), Kish 1965.

    `weights`: of tokens or sequences, any shape, at least one above 0. `mask`: bool, the same shape; those that count.
    1: all weigh the same. A small share says that few tokens decide the gradient: lower `max_lag`.

    Raises `UsageError` without a weight above 0.
    """
    found = np.asarray(weights.detach().cpu() if hasattr(weights, "detach") else weights, np.float64)
    if mask is not None:
        found = found[np.asarray(mask.cpu() if hasattr(mask, "cpu") else mask, bool)]
    squares = float((found**2).sum())
    if squares == 0.0:
        raise UsageError("effective_share: no weight is above 0.")
    return float(found.sum()) ** 2 / (found.size * squares)


def log_ratios_by_version(rollout: Rollout, new: Sequence[float]) -> dict[Version, float]:
    """The mean of log pi - log mu in nats a token, by the (epoch, version) that drew the tokens, oldest first.

    `new`: log pi of each token of the completion, without the prompt. Shows how far each version is from the weights
    being trained: near 0 for the newest, and growing with the lag. A newest version that is far off says that trainer
    and engine compute different probabilities for the same weights.

    Raises `UsageError` when `new` has another length than the completion.
    """
    if len(new) != len(rollout.logprobs):
        raise UsageError(f"log_ratios_by_version: {len(new)} values for {len(rollout.logprobs)} tokens.")
    sums: dict[Version, list[float]] = {}
    for version, mine, theirs in zip(rollout.versions, new, rollout.logprobs, strict=True):
        sums.setdefault(version, []).append(float(mine) - theirs)
    return {version: math.fsum(found) / len(found) for version, found in sorted(sums.items())}


def _exp(values: Any) -> Any:
    return values.exp() if hasattr(values, "exp") else np.exp(values)


def _where(mask: Any, values: Any, other: float) -> Any:
    if hasattr(values, "masked_fill"):
        return values.masked_fill(~mask, other)
    return np.where(mask, values, np.asarray(other, values.dtype))


def _broadcast(values: Any, like: Any) -> Any:
    return values.expand(like.shape) if hasattr(values, "expand") else np.broadcast_to(values, like.shape)
