"""The order in which a kernel keeps the weights of experts, learned by marks.

Some kernels repack a layer's weights after they were loaded: they move elements (into tiles, say), and may put zeros
between them. The code that moves them is compiled, and differs between processors, so nothing about it is assumed.
Marks that number every element go through it, on memory of their own, and come out where the elements would. A kernel
that does anything else than move elements within each expert is found out: the marks do not come out once each.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from .boxes import Box

__all__ = ["NotMoved", "Packing", "learn", "slabs"]

_MARKS: Final = {
    torch.bfloat16: (0x0080, 14),
    torch.float16: (0x0400, 14),
    torch.float32: (0x3F800000, 22),
    torch.float8_e4m3fn: (0x08, 6),
}
"""By dtype: the bits of mark 0, and how many bits a mark counts in. All marks are normal numbers, which
a copy by way of another float keeps."""
_MOST_EXPERTS: Final = 1 << 16
_SLAB: Final = 1 << 22
"""Elements that are looked up at a time: the places take 8 bytes each."""

Process = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
"""A kernel's own code that makes its weights, by name, of loaded ones. It may change those, which nothing else uses."""


class NotMoved(Exception):
    """The kernel's weights are not the loaded ones in another order. The text completes "its kernel ..."."""


class Packing:
    """Where the elements of a parameter are in the kernel's memory. Both consist of one *unit* an expert.

    `unit`, `live_unit`: elements of a unit as loaded, and in the kernel. `places`: by element of a unit as loaded, its
    place in the kernel's; int32 or int64, (unit,).
    """

    def __init__(self, unit: int, live_unit: int, places: NDArray[Any]) -> None:
        self.unit, self.live_unit, self.places = unit, live_unit, places

    @property
    def identity(self) -> bool:
        """Whether the kernel keeps elements where loaders put them."""
        return self.unit == self.live_unit and bool((self.places == np.arange(self.unit)).all())

    def live(self, loaded: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places in the kernel's memory of elements at the places `loaded`. Any shape."""
        units, rest = np.divmod(loaded, self.unit)
        units *= self.live_unit
        units += self.places[rest]
        return units

    def read(self, live: Callable[[NDArray[np.int64]], NDArray[Any]], places: NDArray[np.int64]) -> NDArray[Any]:
        """The loaded elements at `places`. `live`: reads elements of the kernel's memory."""
        return live(self.live(places))


def slabs(box: Box) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """(part of the first axis, the live places of that part: its shape), for a few million elements at a time."""
    inner = np.zeros(box.shape[1:], np.int64)
    for axis, (size, step) in enumerate(zip(box.shape[1:], box.live_strides[1:])):  # noqa: B905 - Python 3.10
        shape = [1] * inner.ndim
        shape[axis] = size
        inner += (np.arange(size, dtype=np.int64) * step).reshape(shape)
    rows = max(1, _SLAB // max(1, inner.size))
    for start in range(0, box.shape[0], rows):
        part = slice(start, min(start + rows, box.shape[0]))
        first = box.live_offset + np.arange(part.start, part.stop, dtype=np.int64) * box.live_strides[0]
        yield part, first.reshape(-1, *[1] * inner.ndim) + inner


def learn(process: Process, loaded: Mapping[str, torch.Tensor]) -> dict[str, Packing]:
    """The packing of each parameter of a layer of experts. The first axis of each counts its experts.

    `process`: called a few times, each time with new memory for all parameters. `loaded`: parameters as loaders fill
    them; only their shapes, dtypes and (unless they have no memory) devices are read.

    Raises `NotMoved` when the kernel's weights are not the loaded ones in another order, and what `process` raises.
    """
    if not loaded or any(parameter.ndim < 2 or not parameter.numel() for parameter in loaded.values()):
        raise NotMoved("has parameters without an axis of experts")
    if any(parameter.shape[0] > _MOST_EXPERTS for parameter in loaded.values()):
        raise NotMoved(f"has more than {_MOST_EXPERTS} experts")
    for name, parameter in loaded.items():
        if parameter.dtype not in _MARKS:
            raise NotMoved(f"has {name} in {parameter.dtype}, of which no marks are known")
    learner = _Learner(process, loaded)
    learner.check_owners()
    return learner.packings()


class _Learner:
    """Numbers are written in digits, one call of the kernel a digit: an element has fewer bits than they need."""

    def __init__(self, process: Process, loaded: Mapping[str, torch.Tensor]) -> None:
        self._process, self._loaded = process, loaded
        self._bits = min(_MARKS[parameter.dtype][1] for parameter in loaded.values())
        self._units = {name: parameter[0].numel() for name, parameter in loaded.items()}

    def _digits(self, largest: int) -> range:
        return range(max(1, math.ceil(largest.bit_length() / self._bits)))

    def _marks(self, name: str, numbers: NDArray[np.int64], digit: int) -> NDArray[Any]:
        dtype = self._loaded[name].dtype
        marks = ((numbers >> (digit * self._bits)) & ((1 << self._bits) - 1)) + _MARKS[dtype][0]
        return marks.astype(f"i{dtype.itemsize}")

    def _out(self, marks: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[Any]]]:
        """(a parameter, the bits that came out: integers, (experts, live unit)).

        `marks`: the bits that go in, for (experts, unit) or for what broadcasts to that.
        """
        filled = {}
        for name, parameter in self._loaded.items():
            device = "cpu" if parameter.is_meta else parameter.device
            filled[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            bits = torch.from_numpy(marks[name]).to(device)
            filled[name].view(bits.dtype).reshape(parameter.shape[0], -1)[:] = bits
        made = self._process(filled)
        filled.clear()
        if made.keys() != self._loaded.keys():
            raise NotMoved("keeps other parameters than those that were loaded")
        for name, tensor in made.items():
            dtype, experts = self._loaded[name].dtype, self._loaded[name].shape[0]
            if tensor.dtype != dtype:
                raise NotMoved(f"keeps {name} as {tensor.dtype}")
            if not tensor.is_contiguous() or not tensor.numel() or tensor.numel() % experts:
                raise NotMoved(f"keeps {name} with gaps")
            flat = tensor.detach().cpu().reshape(-1).view(getattr(torch, f"int{8 * dtype.itemsize}"))
            yield name, flat.numpy().reshape(experts, -1)

    def check_owners(self) -> None:
        """Raises `NotMoved` unless each element stays in its parameter and with its expert."""
        owners = {
            name: (number * _MOST_EXPERTS + np.arange(parameter.shape[0], dtype=np.int64))[:, None]
            for number, (name, parameter) in enumerate(self._loaded.items())
        }
        for digit in self._digits(len(owners) * _MOST_EXPERTS):
            marks = {name: self._marks(name, numbers, digit) for name, numbers in owners.items()}
            for name, bits in self._out(marks):
                for expert, row in enumerate(bits):
                    if ((row != marks[name][expert]) & (row != 0)).any():
                        raise NotMoved(f"computes its {name}, or mixes those of different experts")

    def packings(self) -> dict[str, Packing]:
        """Raises `NotMoved` unless every expert's elements come out once each, and in one order for all experts."""
        sources: dict[str, NDArray[np.int64]] = {}
        for digit in self._digits(max(self._units.values())):
            marks = {name: self._marks(name, np.arange(unit), digit) for name, unit in self._units.items()}
            for name, bits in self._out(marks):
                if any((row != bits[0]).any() for row in bits[1:]):
                    raise NotMoved(f"orders {name} otherwise for each expert")
                found = bits[0].astype(np.int64) - _MARKS[self._loaded[name].dtype][0]
                empty, before = bits[0] == 0, sources.get(name)
                moved = (found[~empty] >= 0).all() and (found[~empty] < 1 << self._bits).all()
                if not moved or (before is not None and ((before < 0) != empty).any()):
                    raise NotMoved(f"computes its {name}")
                part = found << (digit * self._bits)
                sources[name] = np.where(empty, -1, part if before is None else before + part)
        return {name: _inverse(name, self._units[name], source) for name, source in sources.items()}


def _inverse(name: str, unit: int, source: NDArray[np.int64]) -> Packing:
    """`source`: by place in the kernel's unit, the element that is there, or -1."""
    live = np.flatnonzero(source >= 0)
    elements = source[live]
    if len(elements) != unit or elements.max() >= unit:
        raise NotMoved(f"does not keep each element of {name} once")
    places = np.full(unit, -1, np.int64)
    places[elements] = live
    if places.min() < 0:
        raise NotMoved(f"does not keep each element of {name} once")
    small = len(source) < 1 << 31
    return Packing(unit, len(source), places.astype(np.int32) if small else places)
