"""Linear layers with packed int4 codes, for which vLLM has a kernel on CPUs (compressed-tensors, `pack-quantized`).

The kernel computes with bfloat16 activations. Its codes are in an order of their own (`codes`) and its scales are
transposed (`packing`), so both are written in place. With `VLLM_CPU_INT4_W4A8=1`, it rounds activations to int8 and
computes weights of another form, which cannot be written in place.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from .codes import CodePacking, learn_codes
from .layers import VllmLayer, learned
from .packing import NotMoved, Packing, learn

__all__ = ["VllmLinear", "repacked_linears"]

_log = logging.getLogger(__name__)
_CODES: Final = "weight_packed"
_SCALES: Final = "weight_scale"
_SHAPE: Final = "weight_shape"
"""Integers that no kernel reads."""


class VllmLinear(VllmLayer):
    """One such layer; see `repacked.Repacked`."""

    idle = (_SHAPE,)

    def __init__(self, module: Any, meta: Mapping[str, torch.Tensor], config: Any) -> None:
        """See `VllmLayer`; of `meta`, codes and scales are used."""
        super().__init__(module, {name: meta[name] for name in (_CODES, _SCALES)}, config)
        self.packings: dict[str, Packing | CodePacking] | None = None

    @property
    def key(self) -> Any:
        """See `VllmLayer`."""
        return tuple((meta.shape, meta.dtype, getattr(self.module, name).shape) for name, meta in self._meta.items())

    def process(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `repacked.Repacked`. The kernel's code runs on a twin of the layer."""
        from vllm.config import set_current_vllm_config

        twin = copy.copy(self.module)
        given = {name: self.as_parameter(name, parameter) for name, parameter in parameters.items()}
        twin._parameters = self.module._parameters | given
        with set_current_vllm_config(self._config), torch.no_grad():
            twin.quant_method.process_weights_after_loading(twin)
        return {name: getattr(twin, name).data for name in parameters}

    def learn(self) -> None:
        """See `VllmLayer`."""
        if self.module.use_w4a8:
            self.why = "VLLM_CPU_INT4_W4A8=1 makes its kernel keep another form: set it to 0"
            return
        rows, words = self._meta[_CODES].shape
        scales = self._meta[_SCALES]

        def codes(packed: torch.Tensor) -> torch.Tensor:
            return self.process({_CODES: packed, _SCALES: torch.ones(scales.shape, dtype=scales.dtype)})[_CODES]

        def scaled(one: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            packed = torch.zeros(rows, words, dtype=torch.int32)
            return {_SCALES: self.process({_CODES: packed, _SCALES: one[_SCALES][0]})[_SCALES]}

        try:
            found = {_CODES: learn_codes(codes, rows, 8 * words), **learn(scaled, {_SCALES: scales[None]})}
            for name, meta in self._meta.items():
                if not self.has_whole(name) or getattr(self.module, name).numel() != meta.numel():
                    raise NotMoved(f"keeps {name} otherwise than when it is loaded")
        except NotMoved as error:
            self.why = f"its kernel {error}"
        else:
            self.packings = found


def repacked_linears(model: torch.nn.Module, config: Any) -> list[VllmLinear]:
    """The layers of a loaded model whose kernel keeps packed codes. Reads and writes no live weight.

    `config`: vLLM's. Layers of a vLLM that is not as this plugin knows it are left out: its own reload then has to do.
    """
    try:
        from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError as error:
        _log.warning("swarm: packed codes are left to vLLM's own reload: %s", error)
        return []

    def layers() -> Iterator[VllmLinear]:
        for module in model.modules():
            if not isinstance(getattr(getattr(module, "scheme", None), "kernel", None), CPUWNA16LinearKernel):
                continue
            parameters, _ = get_layerwise_info(module).restore_metadata
            if {_CODES, _SCALES} <= parameters.keys() and "weight_zero_point" not in parameters:
                yield VllmLinear(module, parameters, config)

    return learned(layers(), "packed codes")
