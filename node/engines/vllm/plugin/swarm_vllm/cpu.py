"""What the plugin changes on CPUs, for engines that follow a swarm: the kernels of linear layers and of attention.

vLLM on CPUs repacks the weights of linear layers when it loads them, and they cannot be written afterwards. On GPUs
they stay in place. The plain kernel is slower. Layers of experts have none: they stay repacked (`experts`).

A row's bits must not depend on the rows beside it, or nobody could replay it. So linear layers are computed in blocks
(`blocks`). vLLM's attention divides the keys of long texts among threads when few sequences run, which is turned off;
and with AMX it computes as on a CPU without AMX.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import os
from functools import partial
from typing import Any, Final

import torch
from torch.nn.functional import linear
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils
from vllm.v1.attention.backends import cpu_attn

from .blocks import AMX_ROWS, in_blocks

__all__ = ["keep_weights_in_place"]

_SPLIT_KEYS: Final = "VLLM_CPU_ATTN_SPLIT_KV"
"""vLLM reads this variable at each step. A user's own value stays."""

_original = utils.dispatch_cpu_unquantized_gemm
_original_attention = cpu_attn._get_attn_isa
_replaced = False
"""A linear layer of this process has our kernel: its model follows a swarm. Layers are made before attention."""


def keep_weights_in_place() -> None:
    """Replace vLLM's choice of kernels. A second call does nothing."""
    utils.dispatch_cpu_unquantized_gemm = _dispatch
    cpu_attn._get_attn_isa = _attention


def _attention(*args: Any, **kwargs: Any) -> str:
    """The name of attention's kernel: with AMX, the one for CPUs without it, whose rows depend on no other."""
    name = _original_attention(*args, **kwargs)
    return "vec" if name == "amx" and _replaced else name


def _dispatch(layer: Any, remove_weight: bool) -> Any:
    global _replaced
    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    if transfer is None or transfer.backend != "swarm":
        return _original(layer, remove_weight)
    _replaced = True
    with_amx = torch.cpu._is_amx_tile_supported()
    if with_amx:
        torch.cpu._init_amx()  # attention kernels use AMX without asking the system for it first, and would get SIGILL
    os.environ.setdefault(_SPLIT_KEYS, "0")
    layer.cpu_linear = partial(_linear, AMX_ROWS if with_amx else None)
    return None


def _linear(
    at_once: int | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As torch's function, with bits that depend on no other row. `at_once`: rows of a block; None: all in one."""
    return in_blocks(lambda rows: linear(rows, weight, bias), x, at_once)
