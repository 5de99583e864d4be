"""Whether and by which seeds the swarm's sampler draws, by hooks of SGLang's plugin interface.

Every request draws by its own seed, whatever else is in its batch; one without a seed gets a random one. SGLang itself
drops seeds unless all of its inference is deterministic.
"""

# pyright: reportMissingImports=false
# SGLang is installed in another environment.

import random
from typing import Any

import torch

from .calls import LOADER

__all__ = ["hook"]


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    made = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register("sglang.srt.layers.sampler.create_sampler", _sampler, HookType.AROUND)
    HookRegistry.register(made, _seed, HookType.AFTER)


def _follows() -> bool:
    from sglang.srt.runtime_context import get_model

    return LOADER in (get_model().custom_weight_loader or ())


def _sampler(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not _follows():
        return original(*args, **kwargs)
    from .sampler import SwarmSampler

    return SwarmSampler()


def _seed(info: Any, _: Any, batch: Any, *__: Any, **___: Any) -> Any:
    if info.sampling_seed is None and _follows():
        seeds = [_seed_of(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def _seed_of(request: Any) -> int:
    """A request without a seed keeps the one that it gets first."""
    if request.sampling_params.sampling_seed is None:
        request.sampling_params.sampling_seed = random.getrandbits(31)
    return request.sampling_params.sampling_seed
