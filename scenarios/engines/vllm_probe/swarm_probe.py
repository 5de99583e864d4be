"""Baselines of an update, timed in vLLM's worker processes (`--worker-extension-cls swarm_probe.Probe`).

They are called through vLLM's development route `/collective_rpc`, on loopback.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import time
from typing import Any

import numpy as np
import torch


class Probe:
    """A mixin of vLLM's worker."""

    weight_transfer_engine: Any
    model_runner: Any
    reload_weights: Any

    def probe_keep(self) -> int:
        """Keep a sorted copy of the staged changes; return the number of their elements."""
        staged = self.weight_transfer_engine._weights._staged[1]
        self._probe_kept = []
        for flat, places, bits in staged:
            order = torch.argsort(places)
            self._probe_kept.append((flat, places[order].contiguous(), bits[order].contiguous()))
        return sum(places.numel() for _, places, _ in staged)

    def probe_bare(self) -> float:
        """Return the seconds of writing the kept changes with one `index_copy_` per storage, as the commit does."""
        _synchronize()
        started = time.perf_counter()
        with torch.no_grad():
            for flat, places, bits in self._probe_kept:
                flat.index_copy_(0, places, bits)
        _synchronize()
        return time.perf_counter() - started

    def probe_sparse(self, file: str) -> float:
        """Return the seconds of vLLM's own sparse loader for the same changes, in checkpoint coordinates."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import checkpoint_weight_patch as sparse

        data = np.load(file)
        names = sorted({key[2:] for key in data.files})
        patches = []
        for name in names:
            shape = tuple(int(n) for n in data["s:" + name])
            values = torch.from_numpy(data["b:" + name].view(np.int16)).view(torch.bfloat16)
            indices = torch.from_numpy(data["i:" + name])
            patches.append(sparse.CheckpointWeightPatch(name, shape, torch.bfloat16, values, indices))
        started = time.perf_counter()
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            sparse.load_checkpoint_weight_patches(self.model_runner.get_model(), patches)
        _synchronize()
        return time.perf_counter() - started

    def probe_reload(self) -> float:
        """Return the seconds of a full reload through vLLM's own loaders, from the replica's memory."""
        weights = self.weight_transfer_engine._weights
        pairs = []
        for name, tensor in weights._tensors.items():
            memory = weights._replica._replica[tensor.offset :][: 2 * int(np.prod(tensor.shape))]
            weight = torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16).reshape(tensor.shape)
            pairs += [(accepted, weight) for accepted in weights._maps[name].accepted]
        started = time.perf_counter()
        self.reload_weights(weights_iterator=iter(pairs))
        _synchronize()
        return time.perf_counter() - started


def _synchronize() -> None:
    """Wait for the GPU, which works asynchronously."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
