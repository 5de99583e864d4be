"""What sampling options do to logits, in vLLM's order; see `node.engines.base.SamplingOptions`.

The transformers engine uses it to draw and to score, and vLLM's worker processes to score. vLLM draws with its own
sampler. Needs torch and nothing else.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import torch

__all__ = ["BORDER_NATS", "Options", "keep", "reshape"]

BORDER_NATS: Final = 0.25
"""Nats by which a token may be below the border of `min_p` or `top_k`, and above it by another engine's rounding.
bfloat16 moves a log-probability by 0.06."""


class Options(Protocol):
    """The fields of `SamplingOptions` that change the distribution."""

    @property
    def min_tokens(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logit_bias(self) -> Sequence[tuple[int, float]]: ...
    @property
    def allowed(self) -> Sequence[int]: ...
    @property
    def banned(self) -> Sequence[Sequence[int]]: ...


def reshape(
    logits: torch.Tensor, prompts: torch.Tensor, drawn: torch.Tensor, options: Options, stop_tokens: Sequence[int]
) -> torch.Tensor:
    """New logits of each row's next token, after all that `options` do before the temperature: float32.

    `logits`: (rows, vocabulary). `prompts`, `drawn`: token ids, int64, (rows, length); `drawn`: those after the prompt.
    """
    logits = logits.float().clone()
    minus_inf = float("-inf")
    if options.allowed:
        allowed = torch.as_tensor(options.allowed, dtype=torch.int64, device=logits.device)
        logits = torch.full_like(logits, minus_inf).index_copy_(-1, allowed, logits[:, allowed])
    count = drawn.shape[1]
    for banned in options.banned:
        *before, last = banned
        if len(before) <= count:
            prefix = torch.as_tensor(before, dtype=torch.int64, device=logits.device)
            matches = (drawn[:, count - len(before) :] == prefix).all(-1)
            logits[:, last] = logits[:, last].masked_fill(matches, minus_inf)
    if count < options.min_tokens and stop_tokens:
        logits[:, list(stop_tokens)] = minus_inf
    if options.logit_bias:
        tokens, biases = zip(*options.logit_bias, strict=True)
        logits[:, list(tokens)] += torch.as_tensor(biases, dtype=torch.float32, device=logits.device)
    return _penalize(logits, prompts, drawn, options)


def _penalize(logits: torch.Tensor, prompts: torch.Tensor, drawn: torch.Tensor, options: Options) -> torch.Tensor:
    repetition = options.repetition_penalty
    if repetition == 1.0 and not options.presence_penalty and not options.frequency_penalty:
        return logits
    counts = torch.zeros_like(logits).scatter_add_(-1, drawn, torch.ones_like(drawn, dtype=logits.dtype))
    if repetition != 1.0:
        seen = torch.zeros_like(logits).scatter_(-1, prompts, 1.0) + counts > 0
        logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits -= options.frequency_penalty * counts
    logits -= options.presence_penalty * (counts > 0)
    return logits


def keep(logprobs: torch.Tensor, options: Options, slack: float = 0.0) -> torch.Tensor:
    """`logprobs` with -inf for the tokens that `min_p` and `top_k` exclude; the same tensor if neither is set.

    `logprobs`: (rows, vocabulary), after the temperature. `slack`: nats by which both borders are lowered.
    """
    if options.min_p:
        border = logprobs.amax(-1, keepdim=True) + torch.tensor(options.min_p).log().item() - slack
        logprobs = logprobs.masked_fill(logprobs < border, float("-inf"))
    if 0 < options.top_k < logprobs.shape[-1]:
        border = logprobs.topk(options.top_k, -1).values[:, -1:] - slack
        logprobs = logprobs.masked_fill(logprobs < border, float("-inf"))
    return logprobs
