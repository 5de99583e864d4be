"""Portable draws in a worker process: `SamplingOptions.portable`, by the noise that others can compute.

vLLM tells `PortableDraws`, one of its logits processors, which row of the batch is which request. vLLM's sampler draws
after everything that a request may ask for; `install` lets it replace the tokens of the requests that carry `NOISE`.
The log-probabilities that vLLM reports are those before the noise.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.sampler import Sampler

from .noise import draw, places

__all__ = ["NOISE", "PortableDraws", "install"]

NOISE = "swarm_noise"
"""In a request's `extra_args`: its sampling seed and its stream, a list of two numbers of 64 bits."""

_original = Sampler.sample


class PortableDraws(LogitsProcessor):
    """Knows the requests with portable draws. It changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[int, int, list[int]]] = {}
        """By row of the batch: seed, stream, and vLLM's own list of the tokens so far."""

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        process_dict_updates(self._rows, batch_update, _row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def redraw(self, tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
        """`tokens` with those of portable requests replaced. `logprobs`: what each row is drawn from."""
        if not self._rows:
            return tokens
        rows = torch.tensor(list(self._rows), dtype=torch.int64, device=logprobs.device)
        noise = places((seed, stream, len(drawn)) for seed, stream, drawn in self._rows.values())
        drawn = draw(logprobs.index_select(0, rows), noise.to(logprobs.device))
        return tokens.index_copy(0, rows, drawn.to(tokens.dtype))


def install() -> None:
    """Change the sampler of this process. A second call does nothing."""
    Sampler.sample = _sample


def _sample(sampler: Any, logits: torch.Tensor, metadata: Any, *more: Any, **named: Any) -> Any:
    tokens, logprobs = _original(sampler, logits, metadata, *more, **named)
    if not metadata.all_greedy and logprobs is not None:
        for processor in metadata.logitsprocs.argmax_invariant:
            if isinstance(processor, PortableDraws):
                tokens = processor.redraw(tokens, logprobs)
    return tokens, logprobs


def _row(params: Any, prompt: Any, drawn: list[int]) -> tuple[int, int, list[int]] | None:
    """The state of a request that enters the batch; None for one whose draws are not portable."""
    found = (params.extra_args or {}).get(NOISE)
    if not isinstance(found, list) or len(found) != 2 or params.temperature < 1e-5:
        return None
    if not all(isinstance(number, int) and 0 <= number < 1 << 64 for number in found):  # a user's own request
        return None
    return found[0], found[1], drawn
