"""What the plugin changes on CPUs, for engines that follow a swarm: the kernels of linear layers and of attention.

vLLM on CPUs repacks the weights of linear layers when it loads them, and they cannot be written afterwards. On GPUs
they stay in place. The plain kernel is slower. Layers of experts have none: they stay repacked (`experts`).

A row's bits must not depend on the rows beside it, or nobody could replay it. Kernels for few rows add in another order
than those for many, and vLLM's attention divides the keys of long texts among threads when few sequences run. With AMX,
matrix kernels also cut wide sums by the number of rows, so rows are then computed in blocks of one size; and attention
computes as on a CPU without AMX.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import os
from functools import partial
from typing import Any, Final

import torch
from torch.nn.functional import linear, pad
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers import utils
from vllm.v1.attention.backends import cpu_attn

__all__ = ["AMX_ROWS", "ROWS_MULTIPLE", "keep_weights_in_place"]

ROWS_MULTIPLE: Final = 4
"""Rows of a linear layer's input are padded to a multiple of this. bfloat16 rounds otherwise for 1 row, float32 for 1
to 3, and with two threads for 5 to 7 and 9 to 11."""
AMX_ROWS: Final = 32
"""Rows that a linear layer computes at a time on a CPU with AMX. Fewer cost more when texts are read (blocks of 4: ten
times as long as all rows at once; of 32: two to three times), more cost more when tokens are drawn."""
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
    rows = x.reshape(-1, x.shape[-1])
    if missing := -len(rows) % (at_once or ROWS_MULTIPLE):
        rows = pad(rows, (0, 0, 0, missing))
    elif len(rows) <= (at_once or len(rows)):
        return linear(x, weight, bias)
    parts = [linear(block, weight, bias) for block in rows.split(at_once or len(rows))]
    found = parts[0] if len(parts) == 1 else torch.cat(parts)
    return found[: x.shape[:-1].numel()].reshape(*x.shape[:-1], -1)
