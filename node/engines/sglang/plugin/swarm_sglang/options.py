"""What the options of the driver's requests do to logits, by hooks of SGLang's plugin interface.

The options come with each request and mean what they mean in all engines of a swarm (`swarm_vllm.reshape`). Those that
SGLang has itself do something else: its repetition penalty ends at 2, for example.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from swarm_vllm.messages import Options
from swarm_vllm.reshape import keep, reshape

from .rids import OPTIONS

__all__ = ["hook", "reshape_rows"]

_running: Sequence[Any] = ()
"""The requests of the batch that this process's scheduler runs, in the order of the logits' rows."""
_GREEDY = 1
"""The top-k of a request of temperature 0 in SGLang. No other has that: the driver's top-k is among the options."""


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", _remember, HookType.BEFORE)


def _remember(_: Any, batch: Any, *__: Any, **___: Any) -> None:
    global _running
    _running = batch.reqs


def reshape_rows(logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    """Change the rows of the requests that have options: (rows, vocabulary), in place. `temperatures`: (rows, 1)."""
    found = [(row, options) for row, request in enumerate(_running) if (options := _options(request)) is not None]
    if found and len(_running) != len(logits):
        raise RuntimeError(f"{len(logits)} rows of logits for {len(_running)} requests")
    for row, options in found:
        request, one = _running[row], logits[row : row + 1]
        before, drawn = (
            torch.tensor([list(ids)], dtype=torch.int64, device=logits.device)
            for ids in (request.origin_input_ids, request.output_ids)
        )
        one = reshape(one, before, drawn, options, sorted(request.sampling_params.stop_token_ids or ()))
        if request.sampling_params.top_k != _GREEDY:
            kept = keep((one / temperatures[row]).log_softmax(-1), options)
            one = one.masked_fill(kept == -torch.inf, -torch.inf)
        logits[row] = one[0]


def _options(request: Any) -> Options | None:
    """The options of a request, decoded once; None: it has none."""
    if not hasattr(request, "swarm_options"):
        text = (request.sampling_params.custom_params or {}).get(OPTIONS)
        request.swarm_options = None if text is None else msgspec.json.decode(text, type=Options)
    return request.swarm_options
