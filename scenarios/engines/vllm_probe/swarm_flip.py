"""A bit of a live adapter that changes by itself (`--worker-extension-cls swarm_flip.Flip`)."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import torch

__all__ = ["Flip"]


class Flip:
    """A mixin of vLLM's worker."""

    model_runner: Any

    def flip(self, number: int, module: str, padding: bool) -> int:
        """Flip a bit of the module's B of the adapter with this id; with `padding`, of its last rank, which is zeros
        if the adapter's rank is lower. Returns the index at which vLLM has the adapter."""
        manager = self.model_runner.lora_manager._adapter_manager
        index = manager.lora_index_to_id.index(number)
        stacked = manager.modules[module].lora_b_stacked[0]
        stacked[index].view(torch.int16)[0, 0, -1 if padding else 0] ^= 1 << 10
        return index
