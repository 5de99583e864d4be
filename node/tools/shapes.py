"""Tensor tables of public models (`shapes.toml`), for reckoning what a training step costs without a checkpoint.

A table lists kinds of tensors: one entry stands for the tensors of all layers and experts that have the same shape.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec

__all__ = ["Kind", "Shapes", "shape_names", "shapes_of"]

_FILE: Final = Path(__file__).with_name("shapes.toml")
_DTYPE: Final = "BF16"


@dataclass(frozen=True, slots=True)
class Kind:
    """Tensors of one shape. `name` has `{layer}` where there is one a layer, and `{expert}` where one an expert."""

    name: str
    shape: tuple[int, ...]
    first_layer: int = 0
    layers: int = 1
    experts: int = 1

    @property
    def count(self) -> int:
        """The number of tensors."""
        return self.layers * self.experts

    @property
    def elements(self) -> int:
        """Elements of one tensor."""
        return prod(self.shape)

    def names(self) -> Iterator[str]:
        for layer in range(self.first_layer, self.first_layer + self.layers):
            for expert in range(self.experts):
                yield self.name.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Shapes:
    """A model's tensors without their values. `title`: the model's name."""

    title: str
    kinds: tuple[Kind, ...]

    @property
    def elements(self) -> int:
        return sum(kind.count * kind.elements for kind in self.kinds)

    @cached_property
    def layout(self) -> Layout:
        """The layout that a checkpoint of this model has, without small files."""
        specs = [TensorSpec(name, _DTYPE, kind.shape) for kind in self.kinds for name in kind.names()]
        return Layout(tuple(sorted(specs, key=lambda spec: spec.name)))

    def scaled(self, divisor: int) -> "Shapes":
        """A smaller model with the same kinds of tensors, each with about 1/`divisor` of its elements.

        All tensors of a kind become one tensor with rows of the same length, so that blocks are cut from it as from
        the whole model.
        """
        if divisor < 1:
            raise UsageError("The scale must be 1 or more: 1000 makes a model of a thousandth of the elements.")
        kinds = [
            Kind(
                kind.name.format(layer=kind.first_layer, expert=0),
                (max(1, round(kind.count * kind.shape[0] / divisor)), *kind.shape[1:]),
            )
            for kind in self.kinds
        ]
        return Shapes(f"{self.title} at 1/{divisor}", tuple(kinds))


def _kind(table: dict[str, Any]) -> Kind:
    first, layers = table.get("layers", (0, 1))
    return Kind(table["name"], tuple(table["shape"]), first, layers, table.get("experts", 1))


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text())


def shape_names() -> tuple[str, ...]:
    """The names that `shapes_of` knows."""
    return tuple(_tables())


def shapes_of(name: str) -> Shapes:
    """The model with this name. Raises `UsageError` for an unknown name."""
    table = _tables().get(name.lower())
    if table is None:
        raise UsageError(f"There are no shapes {name!r}: use one of {', '.join(shape_names())}.")
    return Shapes(table["title"], tuple(_kind(tensor) for tensor in table["tensors"]))
