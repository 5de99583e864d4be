"""By how much claimed tokens lose against the winners of their portable draws; see `node.verification.draws`.

The transformers engine and vLLM's worker processes judge by it. Needs torch and blake3.
"""

from typing import Final

import torch

from .noise import noise
from .reshape import BORDER_NATS

__all__ = ["MOST_MARGIN", "margins"]

MOST_MARGIN: Final = 8.0
"""As in `node.verification.draws`."""
_ROWS: Final = 64
"""Tokens whose noise is in memory at a time: 80 MB at a vocabulary of 150,000."""


def margins(
    logprobs: torch.Tensor, tight: torch.Tensor, wide: torch.Tensor, claimed: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    """Nats by which each claimed token loses, from 0 (it wins) to `MOST_MARGIN`: float64, (rows,).

    `logprobs`: (rows, vocabulary), after the temperature. `tight`, `wide`: the same with -inf outside the tightest and
    the widest border that rounding may have moved a cut to; the same tensor if nothing is cut. `rows`: see
    `node.engines.vllm.plugin.swarm_vllm.noise.places`; None: the draw is greedy. All are on one device with float64.

    By another engine's rounding a token near a border may have been inside or outside. The winner is the best of the
    tokens that were surely inside, and the claimed token counts as inside if it may have been. Every cut keeps the
    tokens that are at least as likely as the least likely one that it keeps, so a border is that one's log-probability.
    """
    surely = possibly = logprobs
    if tight is not logprobs:
        upper = torch.minimum(_least(tight) + BORDER_NATS, logprobs.amax(-1, keepdim=True))  # the likeliest is inside
        surely = logprobs.masked_fill(logprobs < upper, float("-inf"))
        possibly = logprobs.masked_fill(logprobs < _least(wide) - BORDER_NATS, float("-inf"))
    found = [
        _lost(surely[part], possibly[part], claimed[part, None], None if rows is None else rows[part])
        for part in (slice(at, at + _ROWS) for at in range(0, len(claimed), _ROWS))
    ]
    return torch.cat(found)


def _lost(
    surely: torch.Tensor, possibly: torch.Tensor, claimed: torch.Tensor, rows: torch.Tensor | None
) -> torch.Tensor:
    surely, possibly = surely.double(), possibly.double()
    if rows is not None:
        added = noise(rows, surely.shape[-1])
        surely, possibly = surely + added, possibly + added
    lost = surely.amax(-1) - possibly.gather(-1, claimed)[:, 0]
    return torch.nan_to_num(lost, nan=MOST_MARGIN, posinf=MOST_MARGIN).clamp(0.0, MOST_MARGIN)


def _least(kept: torch.Tensor) -> torch.Tensor:
    """The log-probability of the least likely token that was not cut off: (rows, 1)."""
    return kept.masked_fill(kept == float("-inf"), float("inf")).amin(-1, keepdim=True)
