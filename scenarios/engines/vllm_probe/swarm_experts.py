"""A kernel for experts that leaves their weights as the checkpoint has them, for an engine on CPUs
(`--worker-extension-cls swarm_experts.Experts`): as triton's does on a GPU. vLLM's own for CPUs repacks them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

__all__ = ["Experts"]


class Experts:
    """Mixed into vLLM's worker: nothing, but that this module is imported before the model is made."""


def _leave(experts: Any, layer: Any) -> None:
    """Nothing is repacked."""


def _apply(
    experts: Any,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *rest: Any,
    **more: Any,
) -> None:
    """(tokens, hidden) through each expert that somebody chose, in their order."""
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, choice = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, -1)
        made = linear(silu(gate) * up, w2[expert]).float()
        total.index_add_(0, rows, made * topk_weights[rows, choice, None].float())
    output.copy_(total)


CPUUnquantizedExperts.process_weights_after_loading = _leave
CPUUnquantizedExperts.apply = _apply
