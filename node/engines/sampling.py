"""Drawing tokens from logits, with randomness that belongs to each row alone."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from node.engines.base import SamplingParams

__all__ = ["draw", "log_probabilities", "scores", "uniforms"]


def uniforms(seed: int, streams: Sequence[int], count: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1): float64, (len(streams), count); row i depends on (seed, streams[i]) only.

    Philox, so that they stay the same from one release of numpy to the next.
    """
    rows = [np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, s)))).random(count) for s in streams]
    return np.stack(rows)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-probability, by inverting the cumulated distribution at `uniform`.

    `logits`: (rows, vocabulary), any float dtype. `uniform`: float64, (rows,). Returns int64 and float32, both (rows,);
    see `Completion.logprobs` for which distribution. Inverting keeps a token where it is when logits move in their last
    bits, except for a `uniform` that sits on the border of two tokens.
    """
    logprobs = log_probabilities(logits, sampling)
    if sampling.temperature == 0.0:
        token = logprobs.argmax(-1)
        return token, logprobs.gather(-1, token[:, None])[:, 0]
    cumulated = logprobs.double().exp().cumsum(-1)
    # right=True never lands on a token of probability 0; the clamp is for a product that rounds up to the whole sum.
    token = torch.searchsorted(cumulated, (uniform * cumulated[:, -1])[:, None], right=True)
    token = token.clamp_max_(logits.shape[-1] - 1)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def log_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """What `Completion.logprobs` are measured in: float32, (rows, vocabulary); -inf for what top-p cuts off."""
    if sampling.temperature == 0.0:
        return torch.log_softmax(logits.float(), -1)
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    return torch.log_softmax(_nucleus(logprobs, sampling.top_p), -1) if sampling.top_p < 1.0 else logprobs


def scores(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """`log_probabilities`, but a token that lies just outside the nucleus (`SamplingParams.widest_top_p`) is as likely
    as it would be inside: by another's rounding it was."""
    if sampling.temperature == 0.0 or sampling.top_p == 1.0:
        return log_probabilities(logits, sampling)
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    mass = _nucleus(logprobs, sampling.top_p).logsumexp(-1, keepdim=True)
    return _nucleus(logprobs, sampling.widest_top_p) - mass


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of likeliest tokens whose probability reaches `top_p`, as they are; the others at -inf."""
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(kept).scatter_(-1, order, kept)
