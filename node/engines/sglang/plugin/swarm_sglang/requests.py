"""Seeds, ends and prefixes of requests, by hooks of SGLang's plugin interface.

- Every request draws by its seed, whatever else is in its batch; one without a seed gets a random one.
- A request of the driver's (its id begins with `swarm-`) ends with one of its own stop tokens, and with no others.
- Prefixes are cached under a key that contains the version, for all requests, so a prefix of an older policy is never
  used.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

import random
from typing import Any

import torch

from .rids import OURS

__all__ = ["hook", "name_prefixes"]

_key = ""
"""What is added to the keys of prefixes; empty: no swarm has named the weights yet."""
_names = 0
"""How often the weights were named. A version that is loaded anew is named again: its older prefixes are not used."""
_scheduler: Any = None
"""This process's scheduler; None in others."""


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    made = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    ends = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"
    HookRegistry.register(f"{scheduler}.__init__", _remember, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.handle_generate_request", _key_request, HookType.BEFORE)
    HookRegistry.register(made, _seed, HookType.AFTER)
    HookRegistry.register(ends, _ends, HookType.AROUND)


def name_prefixes(version: str) -> None:
    """The weights of this process are `version` now. No step may run meanwhile."""
    global _key, _names
    before, _names = _key, _names + 1
    _key = f"swarm:{version}#{_names}"
    for request in () if _scheduler is None else _scheduler.waiting_queue:
        own = (request.extra_key or "").removesuffix(before).removesuffix("|") if before else request.extra_key
        request.extra_key = _keyed(own)


def _keyed(own: str | None) -> str | None:
    return f"{own}|{_key}" if own and _key else _key or own


def _remember(_: Any, scheduler: Any, *__: Any, **___: Any) -> None:
    global _scheduler
    _scheduler = scheduler


def _key_request(_: Any, request: Any, **__: Any) -> None:
    request.extra_key = _keyed(request.extra_key)


def _seed(info: Any, _: Any, batch: Any, *__: Any, **___: Any) -> Any:
    from sglang.srt.runtime_context import get_exec

    if get_exec().kernel.sampling_backend == "swarm" and info.sampling_seed is None:
        seeds = [_seed_of(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def _seed_of(request: Any) -> int:
    """A request without a seed keeps the one that it gets first."""
    if request.sampling_params.sampling_seed is None:
        request.sampling_params.sampling_seed = random.getrandbits(31)
    return request.sampling_params.sampling_seed


def _ends(original: Any, request: Any, new: list[int]) -> bool:
    if not request.rid.startswith(OURS):
        return original(request, new)
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    stops = request.sampling_params.stop_token_ids or ()
    for i, token in enumerate(new):
        if token in stops:
            request.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
            request.finished_len = len(request.output_ids) - len(new) + i + 1
            return True
    return False
