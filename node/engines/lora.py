"""Adapters in a transformers model: their matrices on its device, and hooks on its linear layers that add them.

The arithmetic is that of peft (`peft.tuners.lora.layer.Linear`, unmerged, with the matrices in the model's dtype): the
layer's output plus `linear(linear(x, A), B) * scaling`. All rows of a batch use one adapter, or none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import linear
from torch.utils.hooks import RemovableHandle

from codec import Layout
from codec.errors import UsageError
from node.engines.adapters import GivenAdapter, check_features, factors_of, map_weights, slot_root
from node.engines.base import EngineError, Version
from node.engines.widths import Width

__all__ = ["Adapters", "LiveAdapter"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One linear layer's matrices, live, in the model's dtype: `a` (rank, in), `b` (out, rank).

    `kept`: their bits in the checkpoint's dtype, where the live ones are rounded; else None.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    kept: tuple[NDArray[np.uint16], NDArray[np.uint16]] | None


@dataclass(frozen=True)
class LiveAdapter:
    """One version of an adapter. `config`: the bytes of its configuration tensor. `elements`: those of its slot."""

    slot: int
    name: str
    version: Version
    config: bytes
    elements: int
    layers: dict[str, _Layer]
    width: Width

    @property
    def shape(self) -> tuple[tuple[str, int], ...]:
        """The modules and their ranks: adapters of one shape run the same kernels."""
        return tuple((name, len(layer.a)) for name, layer in self.layers.items())

    def root(self) -> bytes:
        """The slot's root, of the live bits. Zeros when a live value is not one that was given."""
        weights = np.zeros(self.elements, np.uint16)
        at = 0
        for layer in self.layers.values():
            for i, live in enumerate((layer.a, layer.b)):
                try:
                    bits = self._bits(live, None if layer.kept is None else layer.kept[i])
                except ValueError:
                    return bytes(32)
                weights[at : at + bits.size] = bits
                at += bits.size
        return slot_root(self.slot, self.config, weights)

    def _bits(self, live: torch.Tensor, kept: NDArray[np.uint16] | None) -> NDArray[np.uint16]:
        integers = live.reshape(-1).view(torch.int32 if live.element_size() == 4 else torch.int16)
        if kept is None:
            return self.width.back(integers)
        if not torch.equal(self.width.convert(kept.reshape(-1)), integers.cpu()):
            raise ValueError("a live value is not the adapter's, rounded")
        return kept.reshape(-1)


class Adapters:
    """The adapters of one model, by slot. `stage` may be called from another thread than the other methods."""

    def __init__(self, model: torch.nn.Module, base: Layout, dtype: torch.dtype) -> None:
        self._model, self._base, self._dtype = model, base, dtype
        self._device = next(model.parameters()).device
        self._slots: dict[int, LiveAdapter] = {}
        self._staged: LiveAdapter | None = None
        self._active: LiveAdapter | None = None
        self._hooks: dict[str, RemovableHandle] = {}
        """By module; each changes the module's output while its adapter is active."""

    def stage(self, given: GivenAdapter) -> bytes:
        """Copy the matrices to the device, and return the slot's root that they have there. Nothing is served yet.

        Raises `UsageError` for what transformers cannot adapt, `EngineError` when the bits are not `given.root`'s,
        `PeerError` for what is not an adapter of this base.
        """
        self._staged = None
        check_features(given.config)
        weights = map_weights(given.fd)
        width = Width("BF16", self._dtype)
        layers = {}
        for module, a, b, scaling in factors_of(given.config, self._base, weights):
            self._check_module(given.name, module)
            kept = None if width.exact else (np.array(a), np.array(b))
            layers[module] = _Layer(self._live(a, width), self._live(b, width), scaling, kept)
        adapter = LiveAdapter(
            given.slot, given.name, given.version, given.config.to_bytes(), weights.size, layers, width
        )
        if (root := adapter.root()) != given.root:
            raise EngineError(f"the bits of the adapter {given.name} are not those of version {given.version}")
        self._staged = adapter
        return root

    def _live(self, bits: NDArray[np.uint16], width: Width) -> torch.Tensor:
        return width.convert(np.ascontiguousarray(bits).reshape(-1)).view(self._dtype).reshape(bits.shape).to(
            self._device
        )  # fmt: skip

    def _check_module(self, name: str, module: str) -> None:
        try:
            found = self._model.get_submodule(module)
        except AttributeError:
            found = None
        if type(found) is not torch.nn.Linear:
            raise UsageError(
                f"transformers cannot adapt {module} of this model, which the adapter {name} changes: train it with "
                "other target_modules, or use --engine vllm."
            )

    def switch(self, slot: int) -> LiveAdapter | None:
        """Serve what is staged. Returns the adapter that the slot had before. Raises `EngineError`."""
        if self._staged is None or self._staged.slot != slot:
            raise EngineError(f"no adapter is staged for slot {slot}")
        before = self._slots.get(slot)
        self._slots[slot], self._staged = self._staged, None
        self._hook_layers()
        return before

    def drop(self, slot: int) -> LiveAdapter | None:
        """Forget the slot's adapter, and return it."""
        before = self._slots.pop(slot, None)
        self._hook_layers()
        return before

    def clear(self) -> None:
        """Forget everything, and take the hooks off the model."""
        self._slots, self._staged = {}, None
        self._hook_layers()

    def at(self, slot: int) -> LiveAdapter:
        """The slot's adapter. Raises `EngineError` for an empty slot."""
        if slot not in self._slots:
            raise EngineError(f"slot {slot} has no adapter")
        return self._slots[slot]

    def named(self, name: str) -> LiveAdapter | None:
        """The adapter of this name; None for the empty name, the base. Raises `EngineError` for an unknown one."""
        if not name:
            return None
        for adapter in self._slots.values():
            if adapter.name == name:
                return adapter
        raise EngineError(f"this engine does not hold the adapter {name}")

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """The model computes with this adapter (empty: with none) while the block runs. Raises `EngineError`."""
        self._active = self.named(name)
        try:
            yield
        finally:
            self._active = None

    def _hook_layers(self) -> None:
        wanted = {module for adapter in self._slots.values() for module in adapter.layers}
        for module in self._hooks.keys() - wanted:
            self._hooks.pop(module).remove()
        for module in wanted - self._hooks.keys():
            self._hooks[module] = self._model.get_submodule(module).register_forward_hook(self._adding(module))

    def _adding(self, module: str) -> Any:
        def add(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
            layer = None if self._active is None else self._active.layers.get(module)
            return out if layer is None else out + linear(linear(inputs[0], layer.a), layer.b) * layer.scaling

        return add
