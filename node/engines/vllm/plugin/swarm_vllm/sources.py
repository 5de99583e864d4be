"""Where weights are loaded from: the replica, or the folder that a user's vLLM was started with."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from .messages import Tensor

__all__ = ["DTYPES", "FolderSource", "OtherSource", "ReplicaSource", "Source"]

DTYPES = {
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


class Source(Protocol):
    """Reads whole tensors of the checkpoint."""

    def read(self, tensor: Tensor) -> tuple[torch.Tensor, bytes]:
        """(the tensor, BLAKE3 of its blocks, concatenated). The hashes are of the very bits that are returned."""
        ...


class ReplicaSource:
    """The swarm's replica. It may change at any time, so each tensor is copied first, and the copy is hashed."""

    def __init__(self, replica: NDArray[np.uint8], block_elements: int) -> None:
        self._replica, self._block_elements = replica, block_elements

    def read(self, tensor: Tensor) -> tuple[torch.Tensor, bytes]:
        dtype = DTYPES[tensor.dtype]
        count = int(np.prod(tensor.shape, dtype=np.int64))
        copy = self._replica[tensor.offset : tensor.offset + count * dtype.itemsize].copy()
        weight = torch.from_numpy(copy.view(f"i{dtype.itemsize}")).view(dtype).reshape(tensor.shape)
        return weight, _block_hashes(copy, self._block_elements * dtype.itemsize)


class FolderSource:
    """The safetensors files of a folder, as they were when vLLM loaded them."""

    def __init__(self, folder: Path, block_elements: int) -> None:
        """Raises `ValueError`, with a sentence for the user, when the folder has no safetensors files."""
        from safetensors import safe_open  # vLLM's own way to read them

        self._block_elements = block_elements
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, "pt")
            self._files |= dict.fromkeys(file.keys(), file)
        if not self._files:
            raise ValueError(f"{folder} has no safetensors files to compare the live weights with")

    def read(self, tensor: Tensor) -> tuple[torch.Tensor, bytes]:
        name = next((name for name in tensor.names if name in self._files), None)
        if name is None:
            raise ValueError(f"vLLM's folder has no tensor {tensor.names[0]}")
        weight = self._files[name].get_tensor(name).contiguous()
        if tuple(weight.shape) != tensor.shape or weight.dtype != DTYPES[tensor.dtype]:
            raise ValueError(f"{name} is {tuple(weight.shape)}, {weight.dtype} in vLLM's folder: another model?")
        dtype = DTYPES[tensor.dtype]
        flat = weight.reshape(-1).view(torch.uint8).numpy()
        return weight, _block_hashes(flat, self._block_elements * dtype.itemsize)


class OtherSource:
    """Other weights of the same shapes, so that everything derived from weights changes with them.

    Each value is doubled and its sign changed: neither a sum nor an absolute maximum stays the same. Integer tensors
    are not changed, because they may be indices.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, tensor: Tensor) -> tuple[torch.Tensor, bytes]:
        weight, hashes = self._source.read(tensor)
        if weight.is_floating_point():
            # torch has no arithmetic for 8-bit floats
            known = weight if weight.element_size() > 1 else weight.to(torch.bfloat16)
            weight = (known * -2).to(weight.dtype)
        return weight, hashes


def _block_hashes(flat: NDArray[np.uint8], step: int) -> bytes:
    return b"".join(blake3(flat[at : at + step].data).digest() for at in range(0, flat.size, step))
