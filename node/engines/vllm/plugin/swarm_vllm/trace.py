"""Finds the boxes of a checkpoint tensor: what `load_weights` would copy where, without copying anything.

Each checkpoint tensor is passed to the model's own loader as an empty probe, under a dispatch mode that records every
copy of a view of the probe into a view of a live tensor, and skips it. Any other write to a live tensor (a computed
value, another dtype) makes the checkpoint tensor opaque: it is loaded, not scattered.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .boxes import Box

__all__ = ["INTEGERS", "Kept", "Numbered", "Storages", "TensorMap", "kept_beside", "record", "trace"]

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FILLS = (torch.ops.aten.fill_, torch.ops.aten.zero_)
"""Loaders clear the padding of vocabularies with these. The padding holds nothing of the checkpoint."""
_HELPERS_DEEP = 2
"""How deep derived tensors are looked for: a quantization method has a kernel, and the kernel has the tensors."""
_NO_HELPERS = (torch.nn.Module, type, ModuleType, FunctionType, MethodType)


class Numbered(Protocol):
    """Live storages that have numbers."""

    def of(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage; None for a storage that is not among them."""
        ...


class Storages:
    """Every storage of a model's parameters and buffers, each once, as flat integers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.flat: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.modules: list[set[str]] = []
        """By storage number: the modules that have a tensor in it."""
        for prefix, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for _, tensor in own:
                storage = tensor.untyped_storage()
                number = self.numbers.setdefault(self._key(tensor), len(self.flat))
                if number == len(self.flat):
                    kind, size = INTEGERS[tensor.element_size()], storage.nbytes() // tensor.element_size()
                    flat = torch.empty(0, dtype=kind, device=tensor.device).set_(storage, 0, (size,), (1,))
                    self.flat.append(flat)
                    self.modules.append(set())
                self.modules[number].add(prefix)

    @contextmanager
    def standing_for(self, twins: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """(a tensor, a live one): meanwhile the storage of the first has the number of the second's."""
        own, kept = dict(self.numbers), list(twins)  # a storage that is freed may give its address to another
        self.numbers |= {self._key(twin): self.numbers[self._key(live)] for twin, live in kept}
        try:
            yield
        finally:
            self.numbers = own

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def of(self, tensor: torch.Tensor) -> int | None:
        """The number of the tensor's storage; None for a storage that is not the model's."""
        return self.numbers.get(self._key(tensor))


class TensorMap:
    """One checkpoint tensor's boxes, or in `opaque` the reason why they cannot be relied on."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.opaque = ""
        self.storages: set[int] = set()
        """The numbers of the storages that its loader writes to, in any way."""
        self.accepted: list[str] = []
        """Those of its names (its own, its aliases) that the loader accepts."""

    @classmethod
    def of_modules(cls, storages: Storages, modules: set[str], accepted: list[str]) -> "TensorMap":
        """The map of a tensor of which only the modules that it feeds are known."""
        found = cls()
        found.opaque = "the engine holds it in another form: quantized, or repacked"
        found.storages = {number for number, own in enumerate(storages.modules) if own & modules}
        found.accepted = accepted
        return found


class _Recorder(TorchDispatchMode):
    """Records and skips copies into live storages. `fills`: carry out what clears them."""

    def __init__(self, storages: Numbered, maps: dict[int, TensorMap], fills: bool) -> None:
        """`maps`: by the storage of each probe, where what is copied from it is recorded."""
        super().__init__()
        self._storages, self._maps, self._fills = storages, maps, fills

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in _FILLS and not self._fills and self._storages.of(args[0]) is not None:
            return args[0]
        if packet is torch.ops.aten.copy_ and (number := self._storages.of(args[0])) is not None:
            self._copied(number, args[0], args[1])
            return args[0]
        if func._schema.is_mutable and packet not in _FILLS:
            for argument, value in zip(func._schema.arguments, args):  # noqa: B905 - defaults are left out of args
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and isinstance(value, torch.Tensor) and (number := self._storages.of(value)) is not None:
                    for found in self._maps.values():
                        found.storages.add(number)
                        found.opaque = f"its loader does {packet} on a live tensor"
                    return value
        return func(*args, **(kwargs or {}))

    def _copied(self, number: int, live: torch.Tensor, source: torch.Tensor) -> None:
        found = self._maps.get(source.untyped_storage()._cdata)
        if found is None:
            for found in self._maps.values():
                found.storages.add(number)
                found.opaque = "its loader computes what it stores"
            return
        found.storages.add(number)
        if source.dtype != live.dtype:
            found.opaque = f"it is {source.dtype} in the checkpoint and {live.dtype} in the model"
        elif source.shape != live.shape:
            found.opaque = "its loader broadcasts it"
        else:
            found.boxes.append(
                Box(
                    number,
                    tuple(live.shape),
                    int(live.storage_offset()),
                    tuple(live.stride()),
                    int(source.storage_offset()),
                    tuple(source.stride()),
                )
            )


def record(storages: Numbered, maps: dict[int, TensorMap]) -> TorchDispatchMode:
    """A context in which nothing is written to the live storages; what would be copied there from probes is recorded.

    `maps`: by the number of each probe's storage (`_cdata`).
    """
    return _Recorder(storages, maps, fills=False)


@torch.no_grad()
def trace(
    load_weights: Callable[[Any], Any],
    storages: Storages,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> TensorMap:
    """The map of one checkpoint tensor, which may have several names. Reads and writes no weight.

    Raises the loader's own exception when it accepts none of the names.
    """
    found = TensorMap()
    refusals: list[Exception] = []
    for name in names:
        probe = torch.empty(shape, dtype=dtype)  # its pages are never touched, so it takes no memory
        before = len(found.storages), len(found.boxes)
        try:
            with _Recorder(storages, {probe.untyped_storage()._cdata: found}, fills=True):
                load_weights([(name, probe)])
        except (KeyError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
            refusals.append(error)  # a tied model accepts only one of the two names
            continue
        if (len(found.storages), len(found.boxes)) != before:
            found.accepted.append(name)
    if len(refusals) == len(names):
        raise refusals[0]
    return found


@dataclass(frozen=True)
class Kept:
    """A tensor that no loader fills, in a module whose weights a loader fills, or in a helper object of that module."""

    prefix: str
    module: torch.nn.Module
    path: str

    @property
    def label(self) -> str:
        return f"{self.prefix}.{self.path}"

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that is there now. vLLM may have replaced it, or its helper, or removed it (None)."""
        found: Any = self.module
        for name in self.path.split("."):
            found = getattr(found, name, None)
        return found if isinstance(found, torch.Tensor) else None


def kept_beside(model: torch.nn.Module, storages: Storages, filled: set[int]) -> dict[str, list[Kept]]:
    """By module: tensors that may be derived from its weights after their load, and would not follow a scatter.

    They are in the module, in a module around it, or in a helper object of either (an attention's kernel, a
    quantization method). `filled`: the storages that loaders write to; views of these follow by themselves. Left out
    are key-value caches, integer tensors, which hold indices, and single numbers, which belong to the model's shape.
    """
    prefixes = {module: prefix for prefix, module in model.named_modules()}
    found: dict[str, list[Kept]] = {}
    for module, prefix in prefixes.items():
        kept = [
            Kept(prefix, module, path)
            for path, tensor in _held(module, "", _HELPERS_DEEP)
            if tensor.numel() > 1 and storages.of(tensor) not in filled
            if tensor.is_floating_point() or isinstance(tensor, torch.nn.Parameter)
        ]
        for part in module.modules() if kept else ():
            found.setdefault(prefixes[part], []).extend(kept)
    return found


def _held(owner: Any, path: str, deep: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(path from the module, tensor) of the tensors of a module, or of a helper object, and of its helpers."""
    own = vars(owner)
    if isinstance(owner, torch.nn.Module):
        own = own | owner._parameters | owner._buffers
    for name, value in own.items():
        if name.startswith("kv_cache"):
            continue
        if isinstance(value, torch.Tensor):
            yield path + name, value
        elif deep and hasattr(value, "__dict__") and not isinstance(value, _NO_HELPERS):
            yield from _held(value, f"{path}{name}.", deep - 1)
