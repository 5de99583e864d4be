"""A trainer's tensors -> the bits of the checkpoint, in a buffer laid out like a replica.

The layout decides: its names, its dtypes, tied tensors once. A float32 master of a bfloat16 tensor is rounded (to
nearest, ties to even, as torch does); every other difference of dtype is refused, because it would not be what the
trainer computes with. Tensors may be torch's, on any device, or numpy arrays of bits.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.bits import Bits
from codec.errors import UsageError
from codec.layout import Layout, TensorSpec

__all__ = ["HostCopy", "named_tensors"]

_WRAPPERS: Final = ("module.", "_orig_mod.", "_fsdp_wrapped_module.")
"""What DistributedDataParallel, torch.compile and the like put into parameter names."""
_TORCH_NAMES: Final = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I8": "int8", "U8": "uint8",
    "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip


def named_tensors(source: Any) -> Iterable[tuple[str, Any]]:
    """(name, tensor) of a `torch.nn.Module`, a mapping, or an iterable of pairs, wrappers' prefixes removed."""
    if hasattr(source, "state_dict"):
        source = source.state_dict()
    pairs = source.items() if isinstance(source, Mapping) else source
    for name, tensor in pairs:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, tensor


class HostCopy:
    """One version's bits in this process's memory. `block(i)` is what a replica's `block(i)` would be."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._bytes: NDArray[np.uint8] = np.zeros(layout.nbytes, np.uint8)

    def block(self, block: int) -> Bits:
        """A block's elements, flat."""
        spec = self._layout.block(block)
        return self._bytes[spec.offset : spec.offset + spec.nbytes].view(spec.dtype.bits)

    def fill(self, source: Any) -> None:
        """Copy every tensor of `source` (see `named_tensors`). When this returns, the source may change.

        Raises `UsageError` naming the tensor when one is missing, unknown, or of another shape or dtype.
        """
        seen: set[str] = set()
        for name, tensor in named_tensors(source):
            try:
                spec = self._layout.tensor(name)
            except KeyError as error:
                raise UsageError(
                    f"The model has a tensor {name} that the base checkpoint lacks. Give Swarm.attach the folder "
                    "that training started from, or publish an iterator of (checkpoint name, tensor)."
                ) from error
            if spec.name in seen:
                self._check_tie(spec, name, tensor)
            else:
                self._copy(spec, name, tensor)
            seen.add(spec.name)
        missing = [spec.name for spec in self._layout.tensors if spec.name not in seen]
        if missing:
            more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise UsageError(f"The model lacks {missing[0]}{more}, which the base checkpoint has: publish all of it.")

    def _view(self, spec: TensorSpec) -> NDArray[np.uint8]:
        offset = self._layout.offset(spec.name)
        return self._bytes[offset : offset + spec.nbytes]

    def _copy(self, spec: TensorSpec, name: str, tensor: Any) -> None:
        if tuple(tensor.shape) != spec.shape:
            raise UsageError(f"{name} is {tuple(tensor.shape)} in the model, {spec.shape} in the base checkpoint.")
        if isinstance(tensor, np.ndarray):
            if tensor.dtype != spec.type.bits:
                raise UsageError(f"{name} is {tensor.dtype}; give the bits of {spec.dtype} as {spec.type.bits}.")
            self._view(spec).view(spec.type.bits)[:] = tensor.reshape(-1)
        else:
            self._torch_view(spec, name, tensor).copy_(tensor.detach())

    def _torch_view(self, spec: TensorSpec, name: str, tensor: Any) -> Any:
        import torch

        wanted = getattr(torch, _TORCH_NAMES[spec.dtype])
        if tensor.dtype is not wanted and not (wanted is torch.bfloat16 and tensor.dtype is torch.float32):
            raise UsageError(
                f"{name} is {tensor.dtype} in the model and {spec.dtype} in the base checkpoint; "
                "only float32 masters of a bfloat16 checkpoint are rounded."
            )
        return torch.from_numpy(self._view(spec)).view(wanted).view(spec.shape)

    def _check_tie(self, spec: TensorSpec, name: str, tensor: Any) -> None:
        """A second name of a tied tensor must hold the same bits, or the tie was broken in training."""
        there = self._view(spec)
        if isinstance(tensor, np.ndarray):
            same = tensor.dtype == spec.type.bits and np.array_equal(there.view(spec.type.bits), tensor.reshape(-1))
        else:
            import torch

            mine = self._torch_view(spec, name, tensor)
            theirs = tensor.detach().to("cpu", mine.dtype).reshape(spec.shape).contiguous()
            same = torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        if not same:
            raise UsageError(
                f"{name} and {spec.name} are tied in the base checkpoint and differ in the model: "
                "start the swarm from a checkpoint in which they are stored apart."
            )
