"""Drawing tokens from logits, with random numbers that depend on the row alone, not on its batch."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from node.engines.base import SamplingOptions, SamplingParams
from node.engines.vllm.plugin.swarm_vllm import noise
from node.engines.vllm.plugin.swarm_vllm.margins import MOST_MARGIN
from node.engines.vllm.plugin.swarm_vllm.margins import margins as claimed_margins
from node.engines.vllm.plugin.swarm_vllm.reshape import BORDER_NATS, keep, reshape

__all__ = [
    "check_options",
    "draw",
    "draw_portable",
    "likeliest",
    "log_probabilities",
    "margins",
    "replayed",
    "reshaped",
    "scores",
    "uniforms",
]

LEAST_MARGIN: Final = 1e-12
"""Nats by which a token that would not be drawn loses in a replay, if it is tied with the winner."""


def uniforms(seed: int, streams: Sequence[int], count: int) -> NDArray[np.float64]:
    """Random numbers in [0, 1): float64, (len(streams), count); row i depends on (seed, streams[i]) only.

    The generator is Philox, whose numbers are the same in every release of numpy.
    """
    rows = [np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, s)))).random(count) for s in streams]
    return np.stack(rows)


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row and its log-probability, by inverting the cumulative distribution at `uniform`.

    `logits`: (rows, vocabulary), any float dtype. `uniform`: float64, (rows,), or fewer: the rows beyond are padding,
    which only decides the shape of the kernels. Returns int64 and float32, one for each of `uniform`;
    `Completion.logprobs` defines the distribution. When logits change in their last bits only, the drawn token stays
    the same, except where `uniform` is at the border between two tokens.
    """
    logprobs = log_probabilities(logits, sampling)[: len(uniform)]
    if sampling.temperature == 0.0:
        token = logprobs.argmax(-1)
        return token, logprobs.gather(-1, token[:, None])[:, 0]
    cumulated = logprobs.double().exp().cumsum(-1)
    # right=True never picks a token of probability 0. The clamp is for a product that rounds up to the whole sum.
    token = torch.searchsorted(cumulated, (uniform * cumulated[:, -1])[:, None], right=True)
    token = token.clamp_max_(logits.shape[-1] - 1)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def draw_portable(
    logits: torch.Tensor, sampling: SamplingParams, places: Sequence[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `draw`, but each row's token is the argmax of log-probability plus the noise of its place.

    `places`: (seed, stream, position) of each row; the rows of `logits` beyond them are padding. Log-probability and
    noise are added in float64, which the device must have. When logits change in their last bits only, the token stays
    the same, except where two tokens are nearly tied.
    """
    logprobs = log_probabilities(logits, sampling)[: len(places)]
    token = _winners(logprobs, sampling, noise.places(places).to(logits.device))
    return token, logprobs.gather(-1, token[:, None])[:, 0]


def replayed(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: SamplingParams, places: Sequence[tuple[int, int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the log-probability of each of `tokens`, float32; by how many nats it loses, float64), both (rows,).

    `logits`, `places`: as `draw_portable` takes them. The log-probability has the bits that drawing the token gives,
    and the margin is 0 if that would draw the token, and above 0 if not. Without portable draws all margins are 0.
    """
    logprobs = log_probabilities(logits, sampling)[: len(places)]
    found = logprobs.gather(-1, tokens[:, None])[:, 0]
    if not sampling.extra.portable:
        return found, torch.zeros_like(found)
    rows = noise.places(places).to(logits.device)
    both = torch.stack([_winners(logprobs, sampling, rows), tokens], 1)
    values = logprobs.gather(-1, both).double()
    if sampling.temperature != 0.0:
        values = values + noise.exact_noise(rows, both)
    lost = torch.nan_to_num(values[:, 0] - values[:, 1], nan=MOST_MARGIN, posinf=MOST_MARGIN)
    return found, torch.where(both[:, 0] == tokens, 0.0, lost.clamp(LEAST_MARGIN, MOST_MARGIN))


def _winners(logprobs: torch.Tensor, sampling: SamplingParams, rows: torch.Tensor) -> torch.Tensor:
    """The portable draws. `rows`: see `noise.places`."""
    return logprobs.argmax(-1) if sampling.temperature == 0.0 else noise.draw(logprobs, rows)


def margins(logits: torch.Tensor, tokens: torch.Tensor, sampling: SamplingParams, stream: int) -> torch.Tensor:
    """By how many nats each token loses against the winner of its portable draw: float64, (rows,), on the CPU.

    `logits[i]`: those of token i, as `reshaped` returns them.
    """
    if logits.device.type == "mps":  # it has no float64
        logits, tokens = logits.cpu(), tokens.cpu()
    if sampling.temperature == 0.0:
        logprobs = log_probabilities(logits, sampling)
        return claimed_margins(logprobs, logprobs, logprobs, tokens, None).cpu()
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    tight = _cut(logprobs, sampling.extra, sampling.tightest_top_p, 0.0)
    wide = _cut(logprobs, sampling.extra, sampling.widest_top_p, 0.0)
    rows = noise.places((sampling.seed, stream, at) for at in range(len(tokens)))
    return claimed_margins(logprobs, tight, wide, tokens, rows.to(logits.device)).cpu()


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


def likeliest(
    logits: torch.Tensor, sampling: SamplingParams, rows: int, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, log-probabilities) of the `count` likeliest tokens of the first `rows` rows, both (rows, count);
    int64 and float32. Beyond the vocabulary: token 0 with -inf."""
    found = log_probabilities(logits, sampling)[:rows].topk(min(count, logits.shape[-1]), -1)
    missing = count - found.indices.shape[-1]
    values = torch.nn.functional.pad(found.values, (0, missing), value=float("-inf"))
    return torch.nn.functional.pad(found.indices, (0, missing)), values


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
