"""SGLang's sampler as the swarm needs it.

A token's log-probability is that of the distribution that it was drawn from, after temperature and the cuts. SGLang's
own samplers tell it before the cuts. Each request draws by a seed of its own (`drawing`), so a draw does not depend on
the batch.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

from typing import Any

import torch
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.layers.sampler import Sampler
from swarm_vllm.noise import draw, places

from .cuts import cut
from .options import reshape_rows

__all__ = ["SwarmSampler"]

_SEEDS = (1 << 64) - 1
"""SGLang's seeds have a sign."""


class _DrawnLogprobs(OutputLogprobProcessor):
    """Reports the log-probabilities of what was drawn, as `drawn` has them."""

    drawn: torch.Tensor | None = None
    """Of the last step's tokens: float32, (rows,); None: all were greedy, and SGLang's own are right."""

    def compute_logprobs(self, *args: Any, **kwargs: Any) -> Any:
        result = super().compute_logprobs(*args, **kwargs)
        if self.drawn is not None:
            result.token_logprobs = self.drawn
        return result


class SwarmSampler(Sampler):
    """See the module. What it does not know (masks, watermarks) is SGLang's own."""

    def __init__(self) -> None:
        super().__init__()
        self.output_logprob_processor = _DrawnLogprobs()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.output_logprob_processor.drawn = None
        return super().forward(*args, **kwargs)

    def _preprocess_logits(self, logits: torch.Tensor, sampling_info: Any) -> torch.Tensor:
        logits = super()._preprocess_logits(logits, sampling_info)
        reshape_rows(logits, sampling_info.temperatures)
        return logits

    def _sample_from_probs(
        self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool
    ) -> tuple[torch.Tensor, None]:
        info = sampling_info
        min_ps = info.min_ps if info.need_min_p_sampling else None
        inside = probs if simple_sampling_case else cut(probs, info.top_ks, info.top_ps, min_ps)
        logprobs = (inside / inside.sum(-1, keepdim=True)).double().log()
        if info.sampling_seed is None:
            tokens = torch.multinomial(inside, num_samples=1)
        else:
            rows = zip(info.sampling_seed.tolist(), positions.tolist())  # noqa: B905 - Python 3.10
            where = places((seed & _SEEDS, 0, position) for seed, position in rows)
            tokens = draw(logprobs.float(), where.to(probs.device)).view(-1, 1)
        drawn = logprobs.gather(-1, tokens)
        # Greedy rows have their log-probability at temperature 1, which is that of these rows.
        greedy = info.top_ks.view(-1, 1) == 1
        drawn = torch.where(greedy, probs.gather(-1, tokens).double().log(), drawn)
        self.output_logprob_processor.drawn = drawn.view(-1).float()
        return tokens.view(-1).to(torch.int32), None
