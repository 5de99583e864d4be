"""Kernels for CPUs that keep weights in other forms than the checkpoint, as quantized and repacked GPU models do.

Enable them with `--worker-extension-cls swarm_kernels.Kernels`. The form depends on the layer of the model: layer 0 is
int8 with one scale per row, layer 1 has its rows in reverse order, layer 2 keeps the weight but computes with a
transposed copy on the layer, and the down projection of layer 3 computes with a copy in a helper object. All other
layers are unchanged.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import re
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.utils import replace_parameter

__all__ = ["Kernels"]

_original = UnquantizedLinearMethod.process_weights_after_loading


class Kernels:
    """An empty mixin of vLLM's worker. It makes vLLM import this module before it creates the model."""


def _process(method: Any, layer: Any) -> None:
    _original(method, layer)
    found = re.search(r"layers\.(\d+)\.", getattr(layer, "prefix", ""))
    make = {"0": _quantize, "1": _repack, "2": _derive}.get(found[1] if found else "")
    if getattr(layer, "prefix", "").endswith("3.mlp.down_proj"):
        make = _delegate
    if make is not None:
        layer.cpu_linear = make(layer)


def _quantize(layer: Any) -> Any:
    wide = layer.weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
    replace_parameter(layer, "weight", (wide / scale).round().to(torch.int8).t().contiguous())
    layer.register_parameter("scale", torch.nn.Parameter(scale, requires_grad=False))

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return torch.nn.functional.linear(x, (weight.t().float() * layer.scale).to(x.dtype), bias)

    return linear


def _repack(layer: Any) -> Any:
    layer.weight.data.copy_(layer.weight.data.flip(0).clone())
    return lambda x, weight, bias: torch.nn.functional.linear(x, weight.flip(0), bias)


def _derive(layer: Any) -> Any:
    twin = layer.weight.data.t().contiguous()
    if hasattr(layer, "twin"):
        layer.twin.copy_(twin)
    else:
        layer.twin = twin
    return lambda x, weight, bias: x @ layer.twin


class _Helper:
    """Computes with its own copy of the weight, and is not a torch module."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = weight.t().contiguous()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        return x @ self.packed


def _delegate(layer: Any) -> Any:
    return _Helper(layer.weight.data)


UnquantizedLinearMethod.process_weights_after_loading = _process
