"""The bits of a torch model's live parameters, by checkpoint name: write, scatter, read back.

Bits are moved through integer views and never computed with, so -0, NaN payloads and denormals arrive as they were. A
bf16 tensor may live in a float32 parameter: a bf16 value is the upper half of the float32 of equal value, so it is kept
there by a shift of its bits. That is for CPUs without bf16 arithmetic, where float32 is ten times as fast.
"""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec

__all__ = ["LiveParameters", "Scatter"]

WIDENED_BITS: Final = 16

DTYPES: Final[dict[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Scatter:
    """One tensor's share of a patch, ready: both on the parameter's device, `bits` in its integer type."""

    target: torch.Tensor
    indices: torch.Tensor
    bits: torch.Tensor

    def apply(self) -> None:
        self.target.index_copy_(0, self.indices, self.bits)


@dataclass(frozen=True, slots=True)
class _Live:
    """A parameter's storage as flat integers, and whether bf16 bits stand in its upper half."""

    storage: torch.Tensor
    widened: bool

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """The unsigned numpy type of one element's bits in the checkpoint."""
        return np.dtype(f"u{2 if self.widened else self.storage.element_size()}")

    def convert(self, bits: NDArray[Any]) -> torch.Tensor:
        """Checkpoint bits as integers of this storage, copied, on its device."""
        if bits.dtype != self.bits_dtype:
            raise ValueError(f"bits: {bits.dtype} for a tensor of {self.bits_dtype}")
        if self.widened:
            wide = bits.astype(np.uint32) << np.uint32(WIDENED_BITS)
            return torch.from_numpy(wide.view(np.int32)).to(self.storage.device)
        signed = np.array(bits).view(f"i{bits.itemsize}")
        return torch.from_numpy(signed).to(self.storage.device)


class LiveParameters:
    """Where each tensor of a layout lives in a model."""

    def __init__(self, model: torch.nn.Module, layout: Layout) -> None:
        """Raises `UsageError` unless the layout's tensors and the model's are the same, tied alike."""
        named = dict(model.named_parameters(remove_duplicate=False)) | _saved_buffers(model)
        self._live = {spec.name: _find(named, spec) for spec in layout.tensors}
        owner: dict[int, str] = {}
        for name, live in self._live.items():
            twin = owner.setdefault(live.storage.data_ptr(), name)
            if twin != name and live.storage.numel():
                raise UsageError(f"The model ties {name} to {twin}, the checkpoint does not: is it another model's?")
        for name, parameter in named.items():
            if parameter.numel() and parameter.data_ptr() not in owner:
                raise UsageError(f"The model has a tensor {name} that the checkpoint lacks: is it another model's?")

    def convert(self, name: str, indices: NDArray[np.int64], bits: NDArray[Any]) -> Scatter:
        """Check one tensor's share of a patch and bring it to the device. Raises `ValueError` when it does not fit."""
        live = self._live.get(name)
        if live is None:
            raise ValueError(f"patch: no tensor named {name}")
        if indices.ndim != 1 or indices.shape != bits.shape or indices.dtype != np.int64:
            raise ValueError(f"patch of {name}: flat int64 indices and as many bits, please")
        if indices.size and (indices[0] < 0 or indices[-1] >= live.storage.numel() or (np.diff(indices) <= 0).any()):
            raise ValueError(f"patch of {name}: indices must rise from 0 to {live.storage.numel() - 1}")
        return Scatter(live.storage, torch.from_numpy(np.array(indices)).to(live.storage.device), live.convert(bits))

    def write(self, name: str, bits: NDArray[Any]) -> None:
        """Overwrite a whole tensor with its checkpoint bits (flat or shaped). Raises `ValueError` on a wrong size."""
        live = self._live[name]
        if bits.size != live.storage.numel():
            raise ValueError(f"{name}: {bits.size} elements for {live.storage.numel()}")
        live.storage.copy_(live.convert(bits.reshape(-1)))

    def read(self, name: str, start: int = 0, count: int | None = None) -> NDArray[Any]:
        """Checkpoint bits of elements [start, start + count), flat. Raises `ValueError` when a widened one has no bf16.

        That last cannot happen unless something computed on the parameter: it is how such a thing would be found.
        """
        live = self._live[name]
        stop = live.storage.numel() if count is None else start + count
        bits = live.storage[start:stop].cpu().numpy()
        if not live.widened:
            return bits.view(live.bits_dtype)
        wide = bits.view(np.uint32)
        if (wide & np.uint32(0xFFFF)).any():
            raise ValueError(f"{name}: a live value has more bits than bf16")
        return (wide >> np.uint32(WIDENED_BITS)).astype(np.uint16)

    def hashes(self, layout: Layout) -> NDArray[np.uint8]:
        """BLAKE3 of each block's live bits: uint8, (n_blocks, 32). All zeros where the bits are of no bf16 value."""
        out = np.zeros((layout.n_blocks, 32), np.uint8)
        for i in range(layout.n_blocks):
            block = layout.block(i)
            try:
                bits = self.read(block.name, block.start, block.count)
            except ValueError:
                continue
            out[i] = np.frombuffer(blake3(bits.tobytes()).digest(), np.uint8)
        return out


def _saved_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    saved = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def _find(named: dict[str, torch.Tensor], spec: TensorSpec) -> _Live:
    """The storage of one layout tensor. Raises `UsageError` when it is missing or of another kind."""
    found = [named[name] for name in (spec.name, *spec.aliases) if name in named]
    if not found:
        raise UsageError(f"The checkpoint has a tensor {spec.name} that the model lacks: is it another model's?")
    tensor = found[0]
    if any(other.data_ptr() != tensor.data_ptr() for other in found):
        raise UsageError(f"The checkpoint ties {spec.name} to {', '.join(spec.aliases)}, the loaded model does not.")
    if tuple(tensor.shape) != tuple(spec.shape):
        raise UsageError(f"{spec.name} is {tuple(spec.shape)} in the checkpoint, {tuple(tensor.shape)} in the model.")
    if not tensor.is_contiguous():
        raise UsageError(f"{spec.name} does not lie in one piece in the model: it cannot be patched in place.")
    wanted = DTYPES.get(spec.dtype)
    widened = wanted is torch.bfloat16 and tensor.dtype is torch.float32
    if tensor.dtype is not wanted and not widened:
        raise UsageError(f"{spec.name} is {spec.dtype} in the checkpoint, {tensor.dtype} in the model: no patch fits.")
    flat = tensor.detach().view(-1) if tensor.dim() else tensor.detach().reshape(1)
    return _Live(flat.view(INTEGERS[tensor.element_size()]), widened)
