"""Drawing tokens from logits, with random numbers that depend on the row alone, not on its batch."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from node.engines.base import SamplingOptions, SamplingParams
from node.engines.vllm.plugin.swarm_vllm.reshape import BORDER_NATS, keep, reshape
from node.verification.draws import MOST_MARGIN
from node.verification.noise import gumbel

__all__ = [
    "check_options",
    "draw",
    "draw_portable",
    "log_probabilities",
    "margins",
    "portable_noise",
    "reshaped",
    "scores",
    "uniforms",
]

_ROWS: Final = 64
"""Tokens whose noise is in memory at a time: 80 MB at a vocabulary of 150,000."""


def uniforms(seed: int, streams: Sequence[int], count: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1): float64, (len(streams), count); row i depends on (seed, streams[i]) only.

    The generator is Philox, whose numbers are the same in every release of numpy.
    """
    rows = [np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, s)))).random(count) for s in streams]
    return np.stack(rows)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-probability, by inverting the cumulative distribution at `uniform`.

    `logits`: (rows, vocabulary), any float dtype. `uniform`: float64, (rows,). Returns int64 and float32, both (rows,);
    `Completion.logprobs` defines the distribution. When logits change in their last bits only, the drawn token stays
    the same, except where `uniform` is at the border between two tokens.
    """
    logprobs = log_probabilities(logits, sampling)
    if sampling.temperature == 0.0:
        token = logprobs.argmax(-1)
        return token, logprobs.gather(-1, token[:, None])[:, 0]
    cumulated = logprobs.double().exp().cumsum(-1)
    # right=True never picks a token of probability 0. The clamp is for a product that rounds up to the whole sum.
    token = torch.searchsorted(cumulated, (uniform * cumulated[:, -1])[:, None], right=True)
    token = token.clamp_max_(logits.shape[-1] - 1)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def portable_noise(seed: int, streams: Sequence[int], position: int, vocabulary: int) -> torch.Tensor:
    """The noise of each row's token number `position`: float64, (len(streams), vocabulary), on the CPU."""
    return torch.from_numpy(np.stack([gumbel(seed, stream, position, vocabulary) for stream in streams]))


def draw_portable(
    logits: torch.Tensor, noise: torch.Tensor, sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `draw`, but the token is the argmax of log-probability plus `noise`, added in float64.

    `noise`: as `portable_noise` returns it, on the device of `logits`; one without float64 cannot draw so. When logits
    change in their last bits only, the token stays the same, except where two tokens are nearly tied.
    """
    logprobs = log_probabilities(logits, sampling)
    token = (logprobs if sampling.temperature == 0.0 else logprobs.double() + noise).argmax(-1)
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def margins(logits: torch.Tensor, tokens: torch.Tensor, sampling: SamplingParams, stream: int) -> torch.Tensor:
    """By how many nats each token loses against the winner of its portable draw: float64, (rows,), on the CPU.

    `logits[i]`: those of token i, as `reshaped` returns them. By another engine's rounding a token near a border may
    have been inside or outside: the winner is the best of those that were surely inside, and the claimed token counts
    as inside if it may have been.
    """
    found = []
    for at in range(0, len(tokens), _ROWS):
        some, claimed = logits[at : at + _ROWS], tokens[at : at + _ROWS, None]
        if sampling.temperature == 0.0:
            surely = possibly = log_probabilities(some, sampling).double().cpu()
        else:
            surely, possibly = (part.double().cpu() for part in _surely_and_possibly(some, sampling))
            rows = [gumbel(sampling.seed, stream, at + i, logits.shape[-1]) for i in range(len(some))]
            noise = torch.from_numpy(np.stack(rows))
            surely, possibly = surely + noise, possibly + noise
        lost = surely.amax(-1) - possibly.gather(-1, claimed.cpu())[:, 0]
        found.append(torch.nan_to_num(lost, nan=MOST_MARGIN, posinf=MOST_MARGIN).clamp(0.0, MOST_MARGIN))
    return torch.cat(found)


def _surely_and_possibly(logits: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities with -inf for tokens outside the tightest and outside the widest borders that rounding allows.

    The likeliest token is always inside. Every cut keeps the tokens that are at least as likely as the least likely one
    that it keeps, so a border is that one's log-probability.
    """
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    tight = _cut(logprobs, sampling.extra, sampling.tightest_top_p, 0.0)
    if tight is logprobs:
        return logprobs, logprobs
    minus_inf = float("-inf")
    wide = _cut(logprobs, sampling.extra, sampling.widest_top_p, 0.0)
    upper = torch.minimum(_least(tight) + BORDER_NATS, logprobs.amax(-1, keepdim=True))
    lower = _least(wide) - BORDER_NATS
    return logprobs.masked_fill(logprobs < upper, minus_inf), logprobs.masked_fill(logprobs < lower, minus_inf)


def _least(kept: torch.Tensor) -> torch.Tensor:
    """The log-probability of the least likely token that was not cut off: (rows, 1)."""
    return kept.masked_fill(kept == float("-inf"), float("inf")).amin(-1, keepdim=True)


def check_options(sampling: SamplingParams, vocabulary: int) -> None:
    """Raises `ValueError` for options that name tokens outside the vocabulary, or might leave no token to draw."""
    options = sampling.extra
    named = {token for token, _ in options.logit_bias}.union(options.allowed, *options.banned)
    if named and max(named) >= vocabulary:
        raise ValueError(f"sampling: a token id outside 0 to {vocabulary - 1}")
    if len(options.never(sampling.stop_tokens)) >= vocabulary:
        raise ValueError("sampling: bad_words and min_tokens leave no token of the vocabulary to draw")


def reshaped(
    logits: torch.Tensor, prompts: torch.Tensor, drawn: Sequence[torch.Tensor], sampling: SamplingParams
) -> torch.Tensor:
    """`logits` after the changes of `sampling.options`, before the temperature; the same tensor if there are none.

    `logits`: (rows, vocabulary). `prompts`: (rows, length). `drawn`: the tokens of each step, (rows,).
    """
    options = sampling.extra
    if not options.reshapes:
        return logits
    so_far = torch.stack(list(drawn), 1) if drawn else prompts[:, :0]
    known = [token for token in sampling.stop_tokens if token < logits.shape[-1]]
    return reshape(logits, prompts, so_far, options, known)


def log_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """The log-probabilities of `Completion.logprobs`: float32, (rows, vocabulary); -inf for tokens that are cut off.

    `logits`: as `reshaped` returns them.
    """
    if sampling.temperature == 0.0:
        return torch.log_softmax(logits.float(), -1)
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    kept = _cut(logprobs, sampling.extra, sampling.top_p, 0.0)
    return logprobs if kept is logprobs else torch.log_softmax(kept, -1)


def scores(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """`log_probabilities`, except that a token just outside a border is scored as if it were inside.

    By another engine's rounding it may have been inside. See `SamplingParams.widest_top_p` and `BORDER_NATS`.
    """
    if sampling.temperature == 0.0:
        return log_probabilities(logits, sampling)
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    kept = _cut(logprobs, sampling.extra, sampling.top_p, 0.0)
    if kept is logprobs:
        return logprobs
    return _cut(logprobs, sampling.extra, sampling.widest_top_p, BORDER_NATS) - kept.logsumexp(-1, keepdim=True)


def _cut(logprobs: torch.Tensor, options: SamplingOptions, top_p: float, slack: float) -> torch.Tensor:
    """`logprobs` with -inf for tokens that `min_p`, `top_k` and `top_p` exclude; the same tensor if they exclude none.

    `slack`: nats by which the borders of `min_p` and `top_k` are lowered.
    """
    kept = keep(logprobs, options, slack)
    if top_p == 1.0:
        return kept
    if kept is logprobs:
        return _nucleus(logprobs, top_p)
    inside = _nucleus(torch.log_softmax(kept, -1), top_p) > float("-inf")
    return kept.masked_fill(~inside, float("-inf"))


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """`logprobs` with -inf outside the nucleus: the smallest set of likeliest tokens whose probability reaches `top_p`
    (Holtzman et al., 2020, arXiv:1904.09751)."""
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.empty_like(kept).scatter_(-1, order, kept)
