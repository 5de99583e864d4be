"""Portable draws and replays in a worker process, both by the noise that others can compute.

vLLM tells `PortableDraws`, one of its logits processors, which row of the batch is which request. vLLM's sampler draws
after everything that a request may ask for; `install` lets it replace the tokens of the requests that carry `NOISE`.
The log-probabilities that vLLM reports are those before the noise.

A request that carries `replays.REPLAY` gets the claimed tokens instead, and everything else about it is computed as if
they had been drawn. By how much each one loses is told in the place of its rank.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from typing import Any, NamedTuple

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler

from .noise import draw, exact_noise, places
from .replays import claimed_of, rank_of

__all__ = ["NOISE", "PortableDraws", "install"]

NOISE = "swarm_noise"
"""In a request's `extra_args`: its sampling seed and its stream, a list of two numbers of 64 bits."""

_sample_original = Sampler.sample
_forward_original = Sampler.forward


class _Row(NamedTuple):
    """A request in the batch. `drawn`: vLLM's own list of its tokens so far.

    `noise`: seed and stream; None: not portable, or greedy. `claimed`: the tokens of a replay, all of them.
    """

    noise: tuple[int, int] | None
    drawn: list[int]
    claimed: tuple[int, ...] = ()


class PortableDraws(LogitsProcessor):
    """Knows the requests with portable draws, and the replays. It changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        """By row of the batch."""
        self._ranks: dict[int, int] = {}
        """Of the replays in the last draw, by row: see `rank_of`."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def redraw(self, tokens: torch.Tensor, logprobs: torch.Tensor | None) -> torch.Tensor:
        """`tokens` with those of portable requests and of replays replaced. `logprobs`: what each row is drawn from."""
        self._ranks = {}
        if not self._rows or logprobs is None:
            return tokens
        tokens = self._draw(tokens, logprobs)
        for row, asked in self._rows.items():
            if asked.claimed and len(asked.drawn) < len(asked.claimed):  # otherwise it is done, and is dropped
                token = asked.claimed[len(asked.drawn)]
                self._ranks[row] = rank_of(_lost(logprobs[row : row + 1], int(tokens[row]), token, _places([asked])))
                tokens[row] = token
        return tokens

    def _draw(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """A copy of `tokens` with the portable draws."""
        portable = {row: asked for row, asked in self._rows.items() if asked.noise is not None}
        if not portable:
            return tokens.clone()
        rows = torch.tensor(list(portable), dtype=torch.int64, device=logprobs.device)
        noise = places((*asked.noise, len(asked.drawn)) for asked in portable.values() if asked.noise is not None)
        drawn = draw(logprobs.index_select(0, rows), noise.to(logprobs.device))
        return tokens.index_copy(0, rows, drawn.to(tokens.dtype))

    def mark(self, ranks: torch.Tensor) -> None:
        """Write the replays' ranks of the last draw over vLLM's."""
        for row, rank in self._ranks.items():
            ranks[row] = rank


def install() -> None:
    """Change the sampler of this process. A second call does nothing."""
    Sampler.sample = _sample
    Sampler.forward = _forward


def _processors(metadata: Any) -> list[PortableDraws]:
    return [found for found in metadata.logitsprocs.argmax_invariant if isinstance(found, PortableDraws)]


def _sample(sampler: Any, logits: torch.Tensor, metadata: Any, *more: Any, **named: Any) -> Any:
    tokens, logprobs = _sample_original(sampler, logits, metadata, *more, **named)
    for processor in _processors(metadata):
        tokens = processor.redraw(tokens, logprobs)
    return tokens, logprobs


def _forward(sampler: Any, logits: torch.Tensor, sampling_metadata: Any, *more: Any, **named: Any) -> Any:
    output = _forward_original(sampler, logits, sampling_metadata, *more, **named)
    if output.logprobs_tensors is not None:
        for processor in _processors(sampling_metadata):
            processor.mark(output.logprobs_tensors.selected_token_ranks)
    return output


def _places(asked: list[_Row]) -> torch.Tensor | None:
    """Where the noise of the next token of one request is; None without noise."""
    (row,) = asked
    return None if row.noise is None else places([(*row.noise, len(row.drawn))])


def _lost(logprobs: torch.Tensor, winner: int, claimed: int, noise: torch.Tensor | None) -> float:
    """Nats by which the claimed token loses against the winner: 0 only if it is the winner; inf if it was cut off."""
    if winner == claimed:
        return 0.0
    pair = torch.tensor([[winner, claimed]], dtype=torch.int64, device=logprobs.device)
    value = logprobs.gather(-1, pair).double()
    if noise is not None:
        value = value + exact_noise(noise.to(logprobs.device), pair)
    return float(value[0, 0] - value[0, 1])


def _row(params: Any, prompt: Any, drawn: list[int]) -> _Row | None:
    """The state of a request that enters the batch; None for one that vLLM's sampler draws."""
    claimed = claimed_of(params)
    noise = None if params.temperature < 1e-5 else _noise((params.extra_args or {}).get(NOISE))
    if noise is None and claimed is None:
        return None
    return _Row(noise, drawn, () if claimed is None else claimed.tokens)


def _noise(found: Any) -> tuple[int, int] | None:
    if not isinstance(found, list) or len(found) != 2:
        return None
    if not all(isinstance(number, int) and 0 <= number < 1 << 64 for number in found):  # a user's own request
        return None
    return found[0], found[1]
