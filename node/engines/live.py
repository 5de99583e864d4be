"""The bits of a torch model's live parameters, by checkpoint name: written whole, patched, and read back.

A transformers model may hold several of a checkpoint's tensors fused in one parameter (`node.models.conversion`); even
then each element has exactly one place. Live tensors may have another dtype than the checkpoint's
(`node.engines.widths`). If the conversion is exact, the checkpoint's bits are read back from the live tensor. If it
rounds, as `from_pretrained` does, the checkpoint's bits are also kept on the host, and reading back checks that the
live values are those bits, rounded.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.engines.widths import INTEGERS, Width, width_of
from node.engines.window import places
from node.models.pieces import Piece, strides_of, whole

__all__ = ["DevicePatch", "LiveParameters"]

Bits = NDArray[Any]


@dataclass(frozen=True, slots=True)
class DevicePatch:
    """One tensor's changes, ready to be written.

    `parts`: (live or kept storage, flat; int64 indices into it; integers as wide as its elements), all three on the
    storage's device.
    """

    parts: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    def write(self) -> None:
        """Write the new bits into the live parameters."""
        for target, indices, bits in self.parts:
            target.index_copy_(0, indices, bits)


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of a parameter. `storage`: the whole parameter as integers, in its own shape."""

    storage: torch.Tensor
    piece: Piece
    width: Width

    @property
    def view(self) -> torch.Tensor:
        ends = zip(self.piece.start, self.piece.shape, strict=True)
        return self.storage[tuple(slice(start, start + size) for start, size in ends)]

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """(which of the flat checkpoint `indices` lie in this box, their flat indices in the parameter)."""
        piece = self.piece
        left = indices - piece.offset
        there = np.zeros_like(indices)
        inside = np.ones(len(indices), bool)
        steps = strides_of(self.storage.shape)
        for dim in sorted(range(len(piece.shape)), key=lambda dim: -piece.strides[dim]):
            at = np.zeros_like(left) if piece.shape[dim] == 1 else left // piece.strides[dim]
            left = left - at * piece.strides[dim]
            inside &= (at >= 0) & (at < piece.shape[dim])
            there += (piece.start[dim] + at) * steps[dim]
        inside &= left == 0
        return inside, there[inside]


@dataclass(slots=True)
class _Tensor:
    """One tensor of the checkpoint, and where it is live.

    `kept`: its bits on the host, where they cannot be read back from rounded live values. None until they are written,
    and always None where all boxes are exact.
    """

    spec: TensorSpec
    boxes: tuple[_Box, ...]
    kept: torch.Tensor | None = None

    @property
    def exact(self) -> bool:
        return bool(self.boxes) and all(box.width.exact for box in self.boxes)

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.spec.type.itemsize}")

    @property
    def is_plain(self) -> bool:
        """The tensor is one whole parameter, in the same order."""
        if len(self.boxes) != 1:
            return False
        piece = self.boxes[0].piece
        shape = tuple(self.boxes[0].storage.shape)
        return piece.shape == shape and piece.offset == 0 and piece.strides == strides_of(shape)

    def prepare(self, indices: NDArray[np.int64], bits: Bits) -> DevicePatch:
        parts = []
        for box in self.boxes:
            inside, there = (slice(None), np.array(indices)) if self.is_plain else box.locate(indices)
            if there.size or self.is_plain:
                device = box.storage.device
                values = box.width.convert(bits[inside])
                parts.append((box.storage.view(-1), torch.from_numpy(there).to(device), values.to(device)))
        if self.kept is not None:
            parts.append((self.kept, torch.from_numpy(np.array(indices)), _integers(bits)))
        return DevicePatch(tuple(parts))

    def write(self, bits: Bits) -> None:
        flat = bits.reshape(-1)
        for box in self.boxes:
            piece = box.piece
            if self.is_plain:
                box.storage.view(-1).copy_(box.width.convert(flat))
                continue
            taken = np.lib.stride_tricks.as_strided(
                flat[piece.offset :], piece.shape, [step * flat.itemsize for step in piece.strides], writeable=False
            )
            box.view.copy_(box.width.convert(np.ascontiguousarray(taken).reshape(-1)).reshape(piece.shape))
        if not self.exact:
            self.kept = _integers(flat)

    def read(self) -> Bits:
        """All bits of the tensor, flat. Raises `ValueError` when a live value is not a checkpoint's, or nothing was
        written yet."""
        if self.exact and self.is_plain:
            return self.read_part(0, self.spec.elements)
        if self.exact:
            out = np.empty(self.spec.elements, self.bits_dtype)
            for box in self.boxes:
                piece = box.piece
                there = np.lib.stride_tricks.as_strided(
                    out[piece.offset :], piece.shape, [step * out.itemsize for step in piece.strides]
                )
                there[...] = self._back(box, box.view.reshape(-1)).reshape(piece.shape)
            return out
        if self.kept is None:
            raise ValueError(f"{self.spec.name}: nothing was written yet")
        kept = self.kept.numpy().view(self.bits_dtype)
        for box in self.boxes:
            piece = box.piece
            taken = np.lib.stride_tricks.as_strided(
                kept[piece.offset :], piece.shape, [step * kept.itemsize for step in piece.strides]
            )
            wanted = box.width.convert(np.ascontiguousarray(taken).reshape(-1))
            if not torch.equal(wanted, box.view.reshape(-1).cpu()):
                raise ValueError(f"{self.spec.name}: a live value is not the checkpoint's, rounded")
        return kept

    def read_part(self, start: int, stop: int) -> Bits:
        if not (self.exact and self.is_plain):
            return self.read()[start:stop]
        return self._back(self.boxes[0], self.boxes[0].storage.view(-1)[start:stop])

    def _back(self, box: _Box, live: torch.Tensor) -> Bits:
        try:
            return box.width.back(live)
        except ValueError as error:
            raise ValueError(f"{self.spec.name}: {error}") from error


class LiveParameters:
    """Where each tensor of a layout lives in a model."""

    def __init__(self, model: torch.nn.Module, layout: Layout, dtype: torch.dtype | None = None) -> None:
        """`dtype`: the one that a transformers model was loaded as (None: that of its first parameter).

        Raises `UsageError` unless the layout and the model have the same tensors, tied in the same way.
        """
        self._tensors = _of_library(model, layout, dtype) if _is_library(model) else _by_name(model, layout)

    @property
    def kept(self) -> tuple[str, ...]:
        """The tensors whose bits are kept on the host. They must be written before they can be read."""
        return tuple(name for name, tensor in self._tensors.items() if not tensor.exact)

    @property
    def nbytes(self) -> int:
        """Memory of the live parameters."""
        storages = {b.storage.data_ptr(): b.storage for tensor in self._tensors.values() for b in tensor.boxes}
        return sum(storage.nbytes for storage in storages.values())

    def prepare(self, name: str, indices: NDArray[np.int64], bits: Bits) -> DevicePatch:
        """Check one tensor's changes and copy them to the device. Raises `ValueError` when they do not fit."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ValueError(f"patch: no tensor named {name}")
        if indices.ndim != 1 or indices.shape != bits.shape or indices.dtype != np.int64:
            raise ValueError(f"patch of {name}: flat int64 indices and as many bits are needed")
        if bits.dtype != tensor.bits_dtype:
            raise ValueError(f"patch of {name}: bits: {bits.dtype} for a tensor of {tensor.bits_dtype}")
        last = tensor.spec.elements - 1
        if indices.size and (indices[0] < 0 or indices[-1] > last or (np.diff(indices) <= 0).any()):
            raise ValueError(f"patch of {name}: indices must rise from 0 to {last}")
        return tensor.prepare(indices, bits)

    def write(self, name: str, bits: Bits) -> None:
        """Overwrite a whole tensor with its checkpoint bits (flat or shaped). Raises `ValueError` on a wrong size."""
        tensor = self._tensors[name]
        if bits.size != tensor.spec.elements:
            raise ValueError(f"{name}: {bits.size} elements for {tensor.spec.elements}")
        tensor.write(bits)

    def read(self, name: str, start: int = 0, count: int | None = None) -> Bits:
        """Checkpoint bits of elements [start, start + count), flat.

        Raises `ValueError` when a live value is not a checkpoint's: something computed on the parameter.
        """
        tensor = self._tensors[name]
        return tensor.read_part(start, tensor.spec.elements if count is None else start + count)

    def fill_window(self, layout: Layout, blocks: Iterable[int], window: NDArray[np.uint8]) -> None:
        """Write the live bits of blocks to their places in the window; zeros where `read` would raise."""
        whole: tuple[str, Bits | None] = ("", None)
        for place in places(layout, blocks):
            spec, view = place.spec, place.view(window)
            tensor = self._tensors[spec.name]
            try:
                if tensor.exact and tensor.is_plain:
                    view[:] = tensor.read_part(spec.start, spec.start + spec.count)
                    continue
                if whole[0] != spec.name:  # read a tensor of many boxes once for all its blocks in the window
                    whole = (spec.name, tensor.read())
                assert whole[1] is not None
                view[:] = whole[1][spec.start : spec.start + spec.count]
            except ValueError:
                view[:] = 0

    def hashes(self, layout: Layout) -> NDArray[np.uint8]:
        """BLAKE3 of each block's live bits: uint8, (n_blocks, 32). All zeros where `read` would raise."""
        out = np.zeros((layout.n_blocks, 32), np.uint8)
        for spec in layout.tensors:
            tensor = self._tensors[spec.name]
            blocks = layout.blocks_of(spec.name)
            try:
                flat = None if tensor.exact and tensor.is_plain else tensor.read()
            except ValueError:
                continue
            for i in blocks:
                block = layout.block(i)
                stop = block.start + block.count
                try:
                    bits = tensor.read_part(block.start, stop) if flat is None else flat[block.start : stop]
                except ValueError:
                    continue
                out[i] = np.frombuffer(blake3(np.ascontiguousarray(bits).tobytes()).digest(), np.uint8)
        return out


def _integers(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(np.array(bits).view(f"i{bits.itemsize}"))


def _is_library(model: torch.nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _of_library(model: Any, layout: Layout, dtype: torch.dtype | None) -> dict[str, _Tensor]:
    """The tensors of a transformers model: places and dtypes as `from_pretrained` would give them."""
    from node.models.conversion import conversion_of

    conversion = conversion_of(model, layout, dtype or model.dtype)
    named = _named(model)
    for name, kind in conversion.dtypes.items():
        if name in named and named[name].dtype != kind:  # a model built from a config has no exceptions
            named[name].data = named[name].data.to(kind)
    _untie(model, [name for name in named if name in conversion.shapes])
    named = _named(model)
    tensors: dict[str, _Tensor] = {}
    for spec in layout.tensors:
        boxes = []
        for place in conversion.places.get(spec.name, ()):
            width = _width(spec, place.param, named[place.param].dtype)
            boxes.append(_Box(_storage(place.param, named[place.param]), place.piece, width))
        tensors[spec.name] = _Tensor(spec, tuple(boxes))
    _check_all_fed(named, layout, [named[name] for name in conversion.shapes if name in named])
    return tensors


def _untie(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Give parameters that share memory, but are stored apart in the checkpoint, memory of their own.

    transformers' loader does the same, whatever the model's config says about tying.
    """
    owners: dict[int, str] = {}
    named = _named(model)
    for name in names:
        tensor = named[name]
        if not tensor.numel() or owners.setdefault(tensor.data_ptr(), name) == name:
            continue
        parent, _, leaf = name.rpartition(".")
        own = torch.nn.Parameter(tensor.detach().clone(), requires_grad=False)
        setattr(model.get_submodule(parent), leaf, own)


def _by_name(model: torch.nn.Module, layout: Layout) -> dict[str, _Tensor]:
    """The tensors of any other module, whose names are the checkpoint's."""
    named = _named(model)
    tensors: dict[str, _Tensor] = {}
    owner: dict[int, str] = {}
    for spec in layout.tensors:
        tensor = _find(named, spec)
        width = _width(spec, spec.name, tensor.dtype)
        if not width.exact:
            raise UsageError(_dtypes_differ(spec, spec.name, tensor.dtype))
        twin = owner.setdefault(tensor.data_ptr(), spec.name)
        if twin != spec.name and tensor.numel():
            raise UsageError(f"The model ties {spec.name} to {twin}, the checkpoint does not: is it another model's?")
        piece = whole(spec.name, spec.shape)
        boxes = (_Box(_storage(spec.name, tensor), piece[0], width),) if piece else ()
        tensors[spec.name] = _Tensor(spec, boxes)
    _check_all_fed(named, layout, [_find(named, spec) for spec in layout.tensors])
    return tensors


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and saved buffers by name; a tied tensor has several names."""
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in saved}
    return dict(model.named_parameters(remove_duplicate=False)) | buffers


def _check_all_fed(named: dict[str, torch.Tensor], layout: Layout, fed: Iterable[torch.Tensor]) -> None:
    """Raises `UsageError` when the model has a tensor that gets nothing from the checkpoint."""
    ties = {alias: spec.name for spec in layout.tensors for alias in spec.aliases}
    known = {tensor.data_ptr() for tensor in fed}
    for name, tensor in named.items():
        if not tensor.numel() or tensor.data_ptr() in known:
            continue
        if name in ties:
            raise UsageError(f"The checkpoint ties {name} to {ties[name]}, the loaded model does not.")
        raise UsageError(f"The model has a tensor {name} that the checkpoint lacks: is it another model's?")


def _find(named: dict[str, torch.Tensor], spec: TensorSpec) -> torch.Tensor:
    """The model's tensor for `spec`. Raises `UsageError` when it is missing, tied otherwise or of another shape."""
    found = [named[name] for name in (spec.name, *spec.aliases) if name in named]
    if not found:
        raise UsageError(f"The checkpoint has a tensor {spec.name} that the model lacks: is it another model's?")
    tensor = found[0]
    if any(other.data_ptr() != tensor.data_ptr() for other in found):
        raise UsageError(f"The checkpoint ties {spec.name} to {', '.join(spec.aliases)}, the loaded model does not.")
    if tuple(tensor.shape) != tuple(spec.shape):
        raise UsageError(f"{spec.name} is {tuple(spec.shape)} in the checkpoint, {tuple(tensor.shape)} in the model.")
    return tensor


def _storage(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers of the same width. Raises `UsageError` when it is not contiguous."""
    if not tensor.is_contiguous():
        raise UsageError(f"{name} does not lie in one piece in the model: it cannot be patched in place.")
    shaped = tensor.detach()
    if not shaped.dim():
        return shaped.view(1).view(INTEGERS[tensor.element_size()]).view(())
    return shaped.view(INTEGERS[tensor.element_size()])


def _width(spec: TensorSpec, name: str, live: torch.dtype) -> Width:
    width = width_of(spec.dtype, live)
    if width is None:
        raise UsageError(_dtypes_differ(spec, name, live))
    return width


def _dtypes_differ(spec: TensorSpec, name: str, live: torch.dtype) -> str:
    return f"{spec.name} is {spec.dtype} in the checkpoint, {name} is {live} in the model: no patch fits."
