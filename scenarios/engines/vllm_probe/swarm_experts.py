"""A kernel for experts on CPUs that leaves their weights in the checkpoint's layout.

Triton's kernel does the same on a GPU; vLLM's own kernel for CPUs repacks them. Enable it with
`--worker-extension-cls swarm_experts.Experts`.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from typing import Any

import torch
from torch.nn.functional import linear, silu
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

__all__ = ["Experts"]


class Experts:
    """An empty mixin of vLLM's worker. It makes vLLM import this module before it creates the model."""


def _leave(experts: Any, layer: Any) -> None:
    """Replaces the method that repacks weights; does nothing."""


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
    """Compute each chosen expert on its tokens, in the order of the experts. `hidden_states`: (tokens, hidden)."""
    total = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        rows, choice = torch.where(topk_ids == expert)
        gate, up = linear(hidden_states[rows], w1[expert]).chunk(2, -1)
        result = linear(silu(gate) * up, w2[expert]).float()
        total.index_add_(0, rows, result * topk_weights[rows, choice, None].float())
    output.copy_(total)


CPUUnquantizedExperts.process_weights_after_loading = _leave
CPUUnquantizedExperts.apply = _apply
