"""What the plugin changes on CPUs, for engines that follow a swarm: the kernels of linear layers and of attention.

vLLM on CPUs repacks the weights of linear layers when it loads them, and they cannot be written afterwards. On GPUs
they stay in place. The plain kernel is slower; expert layers have none, so they are loaded, not scattered.

A row's bits must not depend on the rows beside it, or nobody could replay it. Kernels for few rows add in another order
than those for many, and vLLM's attention divides the keys of long texts among threads when few sequences run.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import os
from typing import Any, Final

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils

__all__ = ["ROWS_MULTIPLE", "keep_weights_in_place"]

ROWS_MULTIPLE: Final = 4
"""Rows of a linear layer's input are padded to a multiple of this. bfloat16 rounds otherwise for 1 row, float32 for 1
to 3, and with two threads for 5 to 7 and 9 to 11."""
_SPLIT_KEYS: Final = "VLLM_CPU_ATTN_SPLIT_KV"
"""vLLM reads this variable at each step. A user's own value stays."""

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
    os.environ.setdefault(_SPLIT_KEYS, "0")
    layer.cpu_linear = _linear
    return None


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's function, with bits that depend on no other row."""
    rows = x.reshape(-1, x.shape[-1])
    if not (missing := -len(rows) % ROWS_MULTIPLE):
        return torch.nn.functional.linear(x, weight, bias)
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return torch.nn.functional.linear(padded, weight, bias)[: len(rows)].reshape(*x.shape[:-1], -1)
