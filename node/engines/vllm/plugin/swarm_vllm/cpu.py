"""Keeps the weights of linear layers in place on CPUs, for engines that follow a swarm.

vLLM on CPUs repacks these weights when it loads them, and they cannot be written afterwards. On GPUs they stay in
place. The plain kernel is slower; expert layers have none, so they are loaded, not scattered.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils

__all__ = ["keep_weights_in_place"]

_original = utils.dispatch_cpu_unquantized_gemm


def keep_weights_in_place() -> None:
    """Replace vLLM's choice of a kernel. A second call does nothing."""
    utils.dispatch_cpu_unquantized_gemm = _dispatch


def _dispatch(layer: Any, remove_weight: bool) -> Any:
    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    if transfer is None or transfer.backend != "swarm":
        return _original(layer, remove_weight)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # attention kernels use AMX without asking the system for it first, and would get SIGILL
    layer.cpu_linear = torch.nn.functional.linear
    return None
