"""Which modules a checkpoint tensor feeds, for weights that vLLM holds in another form and tracing cannot follow.

A quantized weight has another shape, and its loader refuses a probe. vLLM's own reload begins by giving every layer its
original parameters back, without memory, and wraps their loaders to record what arrives where. This module runs that
part, records which layers a probe reaches, and puts everything back: it fills and processes nothing.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import logging
from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import layerwise

from .messages import Tensor
from .sources import DTYPES

__all__ = ["fed_modules"]

Fed = tuple[set[str], list[str]]
"""(module prefixes, those of the tensor's names that the loader accepts)."""


def fed_modules(model: Any, vllm_config: Any, tensors: Iterable[Tensor]) -> dict[str, Fed]:
    """By each tensor's first name. Changes no weight. Raises `ValueError` where vLLM's reload fails by itself."""
    prefixes = {layer: prefix for prefix, layer in model.named_modules()}
    process, quiet = layerwise._layerwise_process, logging.getLogger(layerwise.__name__)
    level = quiet.level
    quiet.setLevel(logging.ERROR)  # it warns of each layer that gets no weights, and here none gets any
    layerwise._layerwise_process = _process_nothing
    try:
        with set_current_vllm_config(vllm_config):
            layerwise.initialize_layerwise_reload(model)
            try:
                return {tensor.names[0]: _reached(model, prefixes, tensor) for tensor in tensors}
            finally:
                _forget(prefixes)
                _put_back(model, vllm_config)
    finally:
        layerwise._layerwise_process = process
        quiet.setLevel(level)


def _put_back(model: Any, vllm_config: Any) -> None:
    """Raises `ValueError` where vLLM's reload fails although it has nothing to load."""
    try:
        layerwise.finalize_layerwise_reload(model, vllm_config.model_config)
    except Exception as error:
        raise ValueError(
            f"its reload of weights fails by itself ({error}). Start it with another --attention-backend (on CPUs: "
            "CPU_MLA), or use --engine transformers"
        ) from error


def _process_nothing(layer: Any, info: Any) -> None:
    """Stands in for vLLM's function that fills and processes a layer which has all its weights."""


def _reached(model: Any, prefixes: dict[Any, str], tensor: Tensor) -> Fed:
    reached: set[str] = set()
    accepted: list[str] = []
    for name in tensor.names:
        try:
            model.load_weights([(name, torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype]))])
        except Exception:  # a loader may raise anything for a name or shape that it does not have
            _forget(prefixes)
            continue
        found = {prefix for layer, prefix in prefixes.items() if layerwise.get_layerwise_info(layer).loaded_weights}
        _forget(prefixes)
        reached |= found
        accepted += [name] if found else []
    return reached, accepted


def _forget(prefixes: dict[Any, str]) -> None:
    for layer in prefixes:
        info = layerwise.get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0
