"""Layers of experts that vLLM's kernel repacks, and cannot load again.

vLLM repacks experts when it first loads them (on CPUs, and for some kernels of GPUs), and its reload copies checkpoint
weights over repacked ones. This module has what is needed to do better: the kernel's own code makes live weights of a
layer's parameters as loaders expect them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from .layers import VllmLayer, learned
from .packing import NotMoved, Packing, learn

__all__ = ["VllmExperts", "repacked_experts"]

_log = logging.getLogger(__name__)


class VllmExperts(VllmLayer):
    """A vLLM layer of experts without quantization; see `repacked.Repacked`."""

    idle = ()

    def __init__(self, module: Any, meta: Mapping[str, torch.Tensor], config: Any) -> None:
        """See `VllmLayer`."""
        super().__init__(module, meta, config)
        self.packings: dict[str, Packing] | None = None

    @property
    def key(self) -> Any:
        """See `VllmLayer`."""
        shapes = tuple((name, meta.shape, meta.dtype) for name, meta in self._meta.items())
        live = tuple((name, getattr(self.module, name).shape) for name in self._meta)
        return type(self.module.quant_method), self.module.quant_method.experts_cls, shapes, live

    @property
    def identity(self) -> bool:
        """Whether the kernel keeps the weights as they are loaded."""
        return self.packings is not None and all(packing.identity for packing in self.packings.values())

    def process(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `repacked.Repacked`. The kernel's code runs on a twin of the layer that has no kernel yet."""
        from vllm.config import set_current_vllm_config

        twin = copy.copy(self.module)
        twin._parameters = self.module._parameters | {
            name: torch.nn.Parameter(parameter, requires_grad=False) for name, parameter in parameters.items()
        }
        twin._buffers = dict(self.module._buffers)
        twin.quant_method = copy.copy(self.module.quant_method)
        twin.quant_method.moe_kernel = twin.quant_method.moe_quant_config = None
        with set_current_vllm_config(self._config), torch.no_grad():
            twin.quant_method.process_weights_after_loading(twin)
        return {name: getattr(twin, name).data for name in parameters}

    def learn(self) -> None:
        """See `VllmLayer`."""
        device = getattr(self.module, next(iter(self._meta))).device
        try:
            packings = learn(self.process, self.loaded_form("meta" if device.type == "cpu" else device))
            for name, packing in packings.items():
                live = getattr(self.module, name)
                if not self.has_whole(name) or live.numel() != packing.live_unit * live.shape[0]:
                    raise NotMoved(f"keeps {name} otherwise than when it is loaded")
        except NotMoved as error:
            self.why = f"its kernel {error}"
        else:
            self.packings = packings


def repacked_experts(model: torch.nn.Module, config: Any) -> list[VllmExperts]:
    """The layers of experts of a loaded model whose kernel repacks them. Reads and writes no live weight.

    `config`: vLLM's. Layers of a vLLM that is not as this plugin knows it are left out: its own reload then has to do.
    """
    try:
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError as error:
        _log.warning("swarm: experts are left to vLLM's own reload: %s", error)
        return []

    def layers() -> Iterator[VllmExperts]:
        for module in model.modules():
            if not isinstance(getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
                continue
            parameters, _ = get_layerwise_info(module).restore_metadata
            if parameters and all(getattr(module, name, None) is not None for name in parameters):
                yield VllmExperts(module, dict(parameters), config)

    return [layer for layer in learned(layers(), "experts") if not layer.identity]
