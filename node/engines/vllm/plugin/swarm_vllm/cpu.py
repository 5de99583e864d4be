"""vLLM on CPUs packs the weights of linear layers anew at load, out of reach; for our engines they stay where they are.

A GPU's stay anyway. The plain kernel costs some speed; expert layers have no plain one, so these are loaded, not
scattered.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is in another environment.

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils

__all__ = ["keep_weights_in_place"]

_original = utils.dispatch_cpu_unquantized_gemm


def keep_weights_in_place() -> None:
    """Loading this twice changes nothing."""
    utils.dispatch_cpu_unquantized_gemm = _dispatch


def _dispatch(layer: Any, remove_weight: bool) -> Any:
    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    if transfer is None or transfer.backend != "swarm":
        return _original(layer, remove_weight)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # the kernels for attention use it and do not ask the system first: SIGILL
    layer.cpu_linear = torch.nn.functional.linear
    return None
