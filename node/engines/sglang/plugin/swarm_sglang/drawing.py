"""Whether and by which seeds the swarm's sampler draws, by hooks of SGLang's plugin interface.

Every request draws by its own seed, whatever else is in its batch; one without a seed gets a random one, the same in
every rank. SGLang itself drops seeds unless all of its inference is deterministic.
"""

# pyright: reportMissingImports=false
# SGLang is installed in another environment.

import random
from typing import Any

import torch

from .calls import LOADER

__all__ = ["follows", "hook"]

_seeds: random.Random | None = None
"""Of requests without a seed. Ranks see these requests in one order, and must draw the same tokens; the module `random`
has one state for all that a process runs, so it may differ between them. None: no request needed one yet."""


def hook() -> None:
    """Register the hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    made = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
    HookRegistry.register("sglang.srt.layers.sampler.create_sampler", _sampler, HookType.AROUND)
    HookRegistry.register(made, _seed, HookType.AFTER)


def follows() -> bool:
    """Whether this SGLang may follow a swarm."""
    from sglang.srt.runtime_context import get_model

    return LOADER in (get_model().custom_weight_loader or ())


def _sampler(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not follows():
        return original(*args, **kwargs)
    from .sampler import SwarmSampler

    return SwarmSampler()


def _seed(info: Any, _: Any, batch: Any, *__: Any, **___: Any) -> Any:
    if info.sampling_seed is None and follows():
        seeds = [_seed_of(request) for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=info.temperatures.device)
    return info


def _seed_of(request: Any) -> int:
    """A request without a seed keeps the one that it gets first."""
    global _seeds
    if request.sampling_params.sampling_seed is None:
        if _seeds is None:
            from sglang.srt.runtime_context import get_device

            _seeds = random.Random(get_device().random_seed)
        request.sampling_params.sampling_seed = _seeds.getrandbits(31)
    return request.sampling_params.sampling_seed
