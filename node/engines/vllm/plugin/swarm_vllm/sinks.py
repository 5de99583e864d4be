"""Attention sinks (of gpt-oss) that follow their parameter.

vLLM's attention for CPUs computes with sinks of bfloat16 or float32. At its first step it puts a float32 copy in the
place of a float16 parameter (`CPUAttentionBackendImpl.forward`, vLLM 0.32), and that copy would stay as it is when the
parameter changes.
"""

from typing import Any

import torch

__all__ = ["follow_sinks"]

AS_THEY_ARE = (torch.bfloat16, torch.float32)
"""vLLM's kernel reads a parameter of these itself."""


def follow_sinks(model: torch.nn.Module) -> None:
    """Have each attention of `model` that keeps a copy of its sinks, or will make one, read the parameter each time."""
    for module in model.modules():
        if (own := module._parameters.get("sinks")) is None or own.device.type != "cpu":
            continue
        for child in module.children():
            attention = getattr(child, "impl", None)
            if getattr(attention, "sinks", None) is not None and own.dtype not in AS_THEY_ARE:
                _follow(attention, module)


def _follow(attention: Any, module: torch.nn.Module) -> None:
    """Make `attention.sinks` the values that the module's parameter has at that moment, in float32."""
    kind = type(attention)
    now = property(lambda self: module.get_parameter("sinks").data.float(), lambda self, value: None)
    vars(attention).pop("sinks", None)
    attention.__class__ = type(kind.__name__, (kind,), {"sinks": now})
