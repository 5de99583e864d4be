"""How many elements of each expert of a mixture a step changes.

Pure. Checkpoints store experts one by one (`...experts.7.up_proj.weight`), or all experts of a layer in one tensor
whose first axis counts them (`...experts.gate_up_proj`). A layer is named by what stands before `.experts.`; tensors of
other names, such as the router's, are of no expert.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from codec.layout import Layout, TensorSpec

__all__ = ["ExpertChanges", "ExpertSpread", "Experts"]

_ONE: Final = re.compile(r"(.*)\.experts\.(\d+)\.")
_ALL: Final = re.compile(r"(.*)\.experts\.")
_NOT_THE_MODELS: Final = "~"
"""Begins the names of tensors that travel with a model and are not its own."""
_MOST: Final = 1 << 16
"""Experts of a layer. A number beyond it in a tensor's name is no expert's."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's experts are. `unit`: elements of each, one after the other; `first`: the number of the first."""

    layer: str
    first: int
    unit: int


def _place(tensor: TensorSpec) -> _Place | None:
    if tensor.name.startswith(_NOT_THE_MODELS):
        return None
    if (one := _ONE.match(tensor.name)) is not None:
        number = int(one[2])
        return _Place(one[1], number, tensor.elements) if number < _MOST and tensor.elements else None
    if (every := _ALL.match(tensor.name)) is not None and len(tensor.shape) > 1 and tensor.elements:
        return _Place(every[1], 0, tensor.elements // tensor.shape[0]) if tensor.shape[0] <= _MOST else None
    return None


class Experts:
    """The experts of a model. False if it has none. `elements`: by layer, of each expert; int64, (experts,)."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._places = [_place(tensor) for tensor in layout.tensors]
        counts: Counter[str] = Counter()
        found = [(place, tensor) for place, tensor in zip(self._places, layout.tensors, strict=True) if place]
        for place, tensor in found:
            counts[place.layer] = max(counts[place.layer], place.first + tensor.elements // place.unit)
        self.elements = {layer: np.zeros(count, np.int64) for layer, count in counts.items()}
        for place, tensor in found:
            self.elements[place.layer][place.first : place.first + tensor.elements // place.unit] += place.unit

    def __bool__(self) -> bool:
        return bool(self.elements)

    @property
    def count(self) -> int:
        """Experts of all layers together."""
        return sum(len(elements) for elements in self.elements.values())

    def of_block(self, block: int, positions: "NDArray[np.uint32] | None") -> tuple[str, int, NDArray[np.int64]] | None:
        """(layer, first expert, changed elements of it and of the experts after it); None: the block is of no expert.

        `positions`: of the changed elements within the block; None: not known, and all count.
        """
        spec = self._layout.block(block)
        place = self._places[spec.tensor]
        if place is None:
            return None
        first, last = spec.start // place.unit, (spec.start + spec.count - 1) // place.unit
        if first == last:
            changed = np.array([spec.count if positions is None else len(positions)])
        elif positions is not None:
            of_tensor = positions.astype(np.int64) + spec.start
            changed = np.bincount(of_tensor // place.unit - first, minlength=last - first + 1)
        else:
            edges = np.clip(np.arange(first, last + 2) * place.unit, spec.start, spec.start + spec.count)
            changed = np.diff(edges)
        return place.layer, place.first + first, changed


@dataclass(frozen=True, slots=True)
class ExpertSpread:
    """How a step's changes are spread over the experts. Shares are changed elements of an expert by all of its own.

    `count`: experts of all layers. `touched`: those of which anything changed.
    """

    count: int
    touched: int
    min: float
    median: float
    max: float

    @property
    def untouched(self) -> int:
        return self.count - self.touched


class ExpertChanges:
    """The changed elements of each expert in one step. `changed`: by layer; int64, (experts,)."""

    def __init__(self, experts: Experts) -> None:
        self._experts = experts
        self.changed = {layer: np.zeros(len(elements), np.int64) for layer, elements in experts.elements.items()}

    def add(self, block: int, positions: "NDArray[np.uint32] | None") -> None:
        """Count a block's changes; see `Experts.of_block`."""
        if (found := self._experts.of_block(block, positions)) is not None:
            layer, first, changed = found
            self.changed[layer][first : first + len(changed)] += changed

    @property
    def touched(self) -> int:
        """Experts of which anything changed."""
        return sum(int(np.count_nonzero(changed)) for changed in self.changed.values())

    def spread(self) -> ExpertSpread:
        """Raises `ValueError` for a model without experts."""
        if not self._experts:
            raise ValueError("the model has no experts")
        elements = self._experts.elements
        shares = np.concatenate([self.changed[layer] / np.maximum(elements[layer], 1) for layer in elements])
        return ExpertSpread(
            len(shares), self.touched, float(shares.min()), float(np.median(shares)), float(shares.max())
        )
