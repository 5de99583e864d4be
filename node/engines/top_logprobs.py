"""The likeliest tokens of each draw with their log-probabilities, as `Completion.top` has them. Pure.

Of each token of a completion there are k pairs of u32 and f32, little-endian, the likeliest first. A pair whose
log-probability is `MIN_LOGPROB` is of a token that could not be drawn; there are fewer than k others then.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from node.engines.base import MIN_LOGPROB

__all__ = ["PAIR", "is_top", "pack_top", "read_top"]

PAIR: Final = np.dtype([("token", "<u4"), ("logprob", "<f4")])


def pack_top(tokens: NDArray[np.integer], logprobs: NDArray[np.floating]) -> bytes:
    """Both of shape (tokens of the completion, k)."""
    pairs = np.empty(tokens.shape, PAIR)
    pairs["token"], pairs["logprob"] = tokens, np.clip(logprobs, MIN_LOGPROB, 0.0)
    return pairs.tobytes()


def read_top(data: bytes, k: int) -> list[list[tuple[int, float]]]:
    """Of each token: (token, log-probability) of those that could be drawn. `data`: as `is_top` accepts it."""
    rows: Any = np.frombuffer(data, PAIR).reshape(-1, k).tolist()
    return [[(token, logprob) for token, logprob in row if logprob > MIN_LOGPROB] for row in rows]


def is_top(data: bytes, tokens: int, k: int) -> bool:
    """Whether `data` is of a completion of `tokens` tokens, `k` each, in order, with logarithms of probabilities."""
    if len(data) != PAIR.itemsize * tokens * k:
        return False
    if not k:
        return True
    logprobs = np.frombuffer(data, PAIR)["logprob"].reshape(tokens, k)
    return bool(
        (logprobs >= MIN_LOGPROB).all() and (logprobs <= 0.0).all() and (np.diff(logprobs, axis=1) <= 0.0).all()
    )
