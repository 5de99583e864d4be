"""Tokens as the argmax of log-probability plus Gumbel noise, and the margin by which a claimed token loses.

The argmax of logits / temperature + Gumbel noise is a draw from the softmax (Gumbel 1954; Maddison, Tarlow and Minka,
"A* sampling", NeurIPS 2014). So a node that knows the noise can draw a sample again. Engines round differently, but two
of them draw different tokens only where two tokens are nearly tied, by no more than their rounding. A node that draws
by other noise loses by a nat or more at most tokens. A node that suppresses a likely token loses by several nats at
that one. So a check sums margins, and does not count matches.

`kept_logprobs` is the definition. Engines compute the same with their own kernels (`node.engines.sampling`). Their
margins allow for rounding at each border: see `node.engines.vllm.plugin.swarm_vllm.margins`.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_MARGIN", "draw", "kept_logprobs", "margins"]

MOST_MARGIN: Final = 8.0
"""Nats. One token counts at most this much; so does a token that cannot be drawn at all."""

Floats = NDArray[np.floating]


def kept_logprobs(
    logits: Floats, temperature: float, *, top_k: int = 0, top_p: float = 1.0, slack: float = 0.0
) -> NDArray[np.float64]:
    """log softmax(logits / temperature), (rows, vocabulary), with -inf for tokens that top-k or top-p exclude.

    top-k keeps the tokens that are at least as likely as number k (0: all); top-p keeps, of those, the smallest set of
    likeliest tokens that has this share of the probability. It is not normalized again: the argmax is the same.
    `slack`: lowers the border of top-k by this many nats, and raises top-p by this much, for another engine's rounding.
    """
    scaled = np.asarray(logits, np.float64) / temperature
    scaled = scaled - scaled.max(-1, keepdims=True)
    logprobs = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    if 0 < top_k < logprobs.shape[-1]:
        border = -np.partition(-logprobs, top_k - 1, -1)[..., top_k - 1 : top_k] - slack
        logprobs = np.where(logprobs < border, -np.inf, logprobs)
    if top_p < 1.0:
        order = np.argsort(-logprobs, -1, kind="stable")
        mass = np.exp(np.take_along_axis(logprobs, order, -1))
        mass = mass / mass.sum(-1, keepdims=True)
        outside = np.cumsum(mass, -1) - mass >= min(1.0, top_p + slack)
        cut = np.empty_like(outside)
        np.put_along_axis(cut, order, outside, -1)
        logprobs = np.where(cut, -np.inf, logprobs)
    return logprobs


def draw(logprobs: Floats, noise: NDArray[np.float64]) -> NDArray[np.int64]:
    """The token of each row; of tied tokens the one with the smallest id. Both arguments: (rows, vocabulary)."""
    return np.argmax(logprobs + noise, -1)


def margins(
    logprobs: Floats, noise: NDArray[np.float64], claimed: NDArray[np.integer], scored: Floats | None = None
) -> NDArray[np.float64]:
    """By how much each claimed token loses against the winner: nats, (rows,), from 0 (it is the winner) to
    `MOST_MARGIN`.

    `scored`: log-probabilities for the claimed token, with wider borders than those in `logprobs`, so that a token that
    rounding put just outside a border loses by its margin, not by `MOST_MARGIN`. NaN counts as impossible.
    """
    values = logprobs + noise
    index = np.asarray(claimed)[:, None]
    theirs = np.take_along_axis((logprobs if scored is None else scored) + noise, index, -1)[:, 0]
    lost = np.where(np.isnan(values), -np.inf, values).max(-1) - theirs
    return np.clip(np.nan_to_num(lost, nan=MOST_MARGIN, posinf=MOST_MARGIN), 0.0, MOST_MARGIN)
