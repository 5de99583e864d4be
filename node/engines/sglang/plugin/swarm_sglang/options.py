"""What the options of the driver's requests do to logits.

The options come with each request and mean what they mean in all engines of a swarm (`swarm_vllm.reshape`). Those that
SGLang has itself do something else: its repetition penalty ends at 2, for example.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

from typing import Any

import torch
from swarm_vllm.messages import Options
from swarm_vllm.reshape import keep, reshape

from .running import as_ids, asked_of, options_of, requests, text_of
from .structures import leave

__all__ = ["GREEDY", "reshape_rows"]

GREEDY = 1
"""The top-k of a request of temperature 0 in SGLang. No other has that: the driver's top-k is among the options."""


def reshape_rows(logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Change the rows of the requests that have options: (rows, vocabulary), in place. `temperatures`: (rows, 1)."""
    for row, request in enumerate(requests(len(logits))):
        if (options := options_of(request)) is None:
            continue
        if options.structure:
            leave(logits[row], request)
        before, drawn = (as_ids(ids, logits.device) for ids in text_of(request))
        one = reshape(logits[row : row + 1], before, drawn, options, stops_of(request))
        if request.sampling_params.top_k != GREEDY:
            one = cut(one, temperatures[row], options)
        logits[row] = one[0]


def stops_of(request: Any) -> list[int]:
    """The tokens that `min_tokens` excludes."""
    asked = asked_of(request)
    return sorted(request.sampling_params.stop_token_ids or (() if asked is None else asked.stops))


def cut(logits: torch.Tensor, temperature: torch.Tensor, options: Options) -> torch.Tensor:
    """The logits with -inf for what `top_k` and `min_p` exclude."""
    kept = keep((logits / temperature).log_softmax(-1), options)
    return logits.masked_fill(kept == -torch.inf, -torch.inf)
