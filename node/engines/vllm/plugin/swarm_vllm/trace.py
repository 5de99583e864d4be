"""Finding the boxes: what `load_weights` would copy where, without copying anything.

Each checkpoint tensor is handed to the model's own loader as an empty probe, under a dispatch mode that writes down
every copy of a view of the probe into a view of a live tensor, and skips it. Whatever else writes to a live tensor
(a computed value, another dtype) makes the checkpoint tensor opaque: it is loaded, not scattered.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .boxes import Box

__all__ = ["INTEGERS", "Storages", "TensorMap", "derived_tensors", "trace"]

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FILLS = (torch.ops.aten.fill_, torch.ops.aten.zero_)
"""Loaders clear the padding of vocabularies with these; it stays as it was."""


class Storages:
    """Every storage that a model's parameters and buffers lie in, once, as flat integers."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.flat: list[torch.Tensor] = []
        self.numbers: dict[int, int] = {}
        self.modules: list[set[str]] = []
        """The modules that have a tensor in each storage."""
        for prefix, module in model.named_modules():
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for _, tensor in own:
                storage = tensor.untyped_storage()
                number = self.numbers.setdefault(storage._cdata, len(self.flat))
                if number == len(self.flat):
                    kind, size = INTEGERS[tensor.element_size()], storage.nbytes() // tensor.element_size()
                    flat = torch.empty(0, dtype=kind, device=tensor.device).set_(storage, 0, (size,), (1,))
                    self.flat.append(flat)
                    self.modules.append(set())
                self.modules[number].add(prefix)

    def of(self, tensor: torch.Tensor) -> int | None:
        return self.numbers.get(tensor.untyped_storage()._cdata)


class TensorMap:
    """One checkpoint tensor's boxes, or why it has none that can be trusted."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []
        self.opaque = ""
        self.storages: set[int] = set()
        """Those that its loader writes to, in whichever way."""
        self.accepted: list[str] = []
        """Those of its names (its own, its aliases') that the loader takes."""

    @classmethod
    def of_modules(cls, storages: Storages, modules: set[str], accepted: list[str]) -> "TensorMap":
        """Of a tensor of which only the modules are known that it feeds."""
        made = cls()
        made.opaque = "vLLM holds it in another form: quantized, or repacked"
        made.storages = {number for number, own in enumerate(storages.modules) if own & modules}
        made.accepted = accepted
        return made


class _Recorder(TorchDispatchMode):
    def __init__(self, storages: Storages, probe: torch.Tensor, found: TensorMap) -> None:
        super().__init__()
        self._storages, self._found = storages, found
        self._probe = probe.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet is torch.ops.aten.copy_ and (number := self._storages.of(args[0])) is not None:
            self._copied(number, args[0], args[1])
            return args[0]
        if func._schema.is_mutable and packet not in _FILLS:
            for argument, value in zip(func._schema.arguments, args):  # noqa: B905 - defaults are left out of args
                writes = argument.alias_info is not None and argument.alias_info.is_write
                if writes and isinstance(value, torch.Tensor) and (number := self._storages.of(value)) is not None:
                    self._found.storages.add(number)
                    self._found.opaque = f"its loader does {packet} on a live tensor"
                    return value
        return func(*args, **(kwargs or {}))

    def _copied(self, number: int, live: torch.Tensor, source: torch.Tensor) -> None:
        self._found.storages.add(number)
        same = source.untyped_storage()._cdata == self._probe
        if not same:
            self._found.opaque = "its loader computes what it stores"
        elif source.dtype != live.dtype:
            self._found.opaque = f"it is {source.dtype} in the checkpoint and {live.dtype} in the model"
        elif source.shape != live.shape:
            self._found.opaque = "its loader broadcasts it"
        else:
            self._found.boxes.append(
                Box(
                    number,
                    tuple(live.shape),
                    int(live.storage_offset()),
                    tuple(live.stride()),
                    int(source.storage_offset()),
                    tuple(source.stride()),
                )
            )


@torch.no_grad()
def trace(
    load_weights: Callable[[Any], Any],
    storages: Storages,
    names: tuple[str, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> TensorMap:
    """The map of one checkpoint tensor, which may have several names. Reads and writes no weight.

    Raises whatever the loader raises when it takes none of the names.
    """
    found = TensorMap()
    refusals: list[Exception] = []
    for name in names:
        probe = torch.empty(shape, dtype=dtype)  # pages that are never touched
        before = len(found.storages), len(found.boxes)
        try:
            with _Recorder(storages, probe, found):
                load_weights([(name, probe)])
        except (KeyError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
            refusals.append(error)  # a tied model knows one of the two names
            continue
        if (len(found.storages), len(found.boxes)) != before:
            found.accepted.append(name)
    if len(refusals) == len(names):
        raise refusals[0]
    return found


def derived_tensors(model: torch.nn.Module, storages: Storages) -> dict[str, str]:
    """Modules that keep floating point tensors beside their parameters and buffers: (module, attribute).

    Such a copy would not follow a scatter. Key-value caches are no weights.
    """
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("kv_cache") or not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if value.numel() and storages.of(value) is None:
                found[prefix] = name
    return found
