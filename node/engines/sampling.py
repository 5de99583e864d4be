"""Sampling tokens: a plain batched loop with a KV cache, whose randomness belongs to each row alone.

A row's random numbers depend on (seed, stream) and its tokens on those and its own logits, so it gets the same tokens
whoever shares its batch, as far as the machine's matrix kernels sum a row in the same order for every batch size (and
who needs certainty beyond that generates the same rows together). Rows in a batch have equal length: no padding, no
mask, nothing that one row could change for another.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from node.engines.base import SamplingParams

__all__ = ["decode", "draw", "uniforms"]


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
    if sampling.temperature == 0.0:
        logprobs = torch.log_softmax(logits.float(), -1)
        token = logprobs.argmax(-1)
        return token, logprobs.gather(-1, token[:, None])[:, 0]
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    if sampling.top_p < 1.0:
        logprobs = _nucleus(logprobs, sampling.top_p)
    cumulated = logprobs.double().exp().cumsum(-1)
    # right=True never lands on a token of probability 0; the clamp is for a product that rounds up to the whole sum.
    token = torch.searchsorted(cumulated, (uniform * cumulated[:, -1])[:, None], right=True)
    token = token.clamp_max_(logits.shape[-1] - 1)
    return token[:, 0], logprobs.gather(-1, token)[:, 0]


def _nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of likeliest tokens whose probability reaches `top_p`, renormalised; the others at -inf."""
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.log_softmax(torch.empty_like(kept).scatter_(-1, order, kept), -1)


@torch.inference_mode()
def decode(
    model: PreTrainedModel, prompts: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64]]:
    """Continue equally long prompts: tokens and log-probabilities (rows, steps), and how many of each row count.

    `prompts`: int64, (rows, length). `uniform`: float64, (rows, max_tokens). A row that met a stop token rides along
    until all have, because dropping it would change the shape of the batch for the others.
    """
    cache, current = DynamicCache(config=model.config), prompts
    stops = torch.tensor(sampling.stop_tokens, dtype=torch.int64, device=prompts.device)
    lengths = torch.full((len(prompts),), sampling.max_tokens, device=prompts.device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    for step in range(sampling.max_tokens):
        output = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token, logprob = draw(output.logits[:, -1], uniform[:, step], sampling)
        tokens.append(token)
        logprobs.append(logprob)
        ended = running & torch.isin(token, stops)
        lengths[ended] = step + 1
        running &= ~ended
        if not running.any():
            break
        current = token[:, None]
    return torch.stack(tokens, 1).cpu().numpy(), torch.stack(logprobs, 1).cpu().numpy(), lengths.cpu().numpy()
