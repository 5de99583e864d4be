"""How likely a model finds the tokens of a prompt, as `Completion.prompt_scores` has it. Pure.

Of each token of the prompt but the first there are 1 + k pairs of u32 and f32, little-endian. The first one is of the
token itself: its rank (how many tokens are at least as likely) and its log-probability after the tokens before it. The
others are the k likeliest tokens in its place with theirs, the likeliest first; where the vocabulary has fewer, the
log-probability is `MIN_LOGPROB`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from node.engines.base import MIN_LOGPROB
from node.engines.top_logprobs import PAIR

__all__ = ["PromptScore", "is_scores", "pack_scores", "read_scores", "scores_bytes"]


class PromptScore(NamedTuple):
    """Of one token of a prompt. `top`: the likeliest tokens in its place with their log-probabilities."""

    rank: int
    logprob: float
    top: Sequence[tuple[int, float]]


def pack_scores(
    ranks: NDArray[np.integer],
    logprobs: NDArray[np.floating],
    tokens: NDArray[np.integer],
    others: NDArray[np.floating],
) -> bytes:
    """`ranks`, `logprobs`: (tokens of the prompt - 1,). `tokens`, `others`: (the same, k); the likeliest first."""
    pairs = np.empty((len(ranks), 1 + tokens.shape[1]), PAIR)
    pairs["token"][:, 0], pairs["token"][:, 1:] = ranks, tokens
    pairs["logprob"][:, 0], pairs["logprob"][:, 1:] = (np.clip(each, MIN_LOGPROB, 0.0) for each in (logprobs, others))
    return pairs.tobytes()


def read_scores(data: bytes, k: int) -> list[PromptScore]:
    """Of each token but the first. `data`: as `is_scores` accepts it."""
    rows: Any = np.frombuffer(data, PAIR).reshape(-1, 1 + k).tolist()
    return [
        PromptScore(rank, logprob, [pair for pair in others if pair[1] > MIN_LOGPROB])
        for (rank, logprob), *others in rows
    ]


def scores_bytes(prompt: int, k: int | None) -> int:
    """The length of the scores of a prompt of so many tokens. `k`: `SamplingOptions.prompt_logprobs`."""
    return 0 if k is None else PAIR.itemsize * (1 + k) * (prompt - 1)


def is_scores(data: bytes, prompt: int, k: int | None) -> bool:
    """Whether `data` is of a prompt of so many tokens with `k` likeliest ones each, in order, with logarithms of
    probabilities. `k`: None: there must be none."""
    if len(data) != scores_bytes(prompt, k):
        return False
    if k is None or not data:
        return True
    pairs = np.frombuffer(data, PAIR).reshape(prompt - 1, 1 + k)
    logprobs, ranks = pairs["logprob"], pairs["token"][:, 0]
    possible = (logprobs >= MIN_LOGPROB).all() and (logprobs <= 0.0).all() and (ranks >= 1).all()
    return bool(possible and (np.diff(logprobs[:, 1:], axis=1) <= 0.0).all())
