"""Modules that keep their weights in another order than loaders put them in, and how they are mapped and loaded.

They are traced with parameters without memory in place of their own, as loaders know them; a place in such a parameter
has a place in the kernel's memory (`packing`). vLLM's reload would copy loaded weights over the kernel's, so these
modules are loaded here: into memory of their own, then through the kernel's code, then over the live bits.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch

from .codes import CODES_A_WORD, CodePacking
from .packing import Packing
from .trace import Storages

__all__ = ["Repacked", "RepackedModules"]


class Repacked(Protocol):
    """One such module. `packings`: by parameter; None: it is not repacked by moving elements, and `why` says more.

    `idle`: its parameters that no kernel reads, and that are not derived from others."""

    why: str

    @property
    def packings(self) -> Mapping[str, Packing | CodePacking] | None: ...

    @property
    def idle(self) -> Collection[str]: ...

    @property
    def module(self) -> torch.nn.Module: ...

    def loaded_form(self, device: Any) -> dict[str, torch.Tensor]:
        """New parameters as loaders expect them, zeros; on device "meta", without memory."""
        ...

    def holding(self, parameters: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """The module has these parameters in place of its own, for loaders."""
        ...

    def process(self, parameters: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """What the kernel makes of loaded parameters, which it may change. The module itself is not changed."""
        ...


class RepackedModules:
    """All such modules of a model. `packings`: by storage number, if the order is known."""

    def __init__(self, storages: Storages, modules: Sequence[Repacked]) -> None:
        self._storages, self._modules = storages, modules
        self.packings: dict[int, Packing | CodePacking] = {}
        self.idle = {storages.of(getattr(module.module, name)) for module in modules for name in module.idle}
        """The numbers of storages from which no kernel reads."""
        self._numbers: list[set[int]] = []
        """By module: the numbers of its storages that loaders fill."""
        for module in modules:
            numbers = {name: storages.of(live) for name, _, live in _pairs(module, module.loaded_form("meta"))}
            self._numbers.append({number for number in numbers.values() if number is not None})
            for name, number in numbers.items():
                if number is not None and module.packings is not None:
                    self.packings[number] = module.packings[name]

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Every module has parameters without memory, in the form that loaders fill, which stand for the live ones."""
        with ExitStack() as stack:
            for module in self._modules:
                form = module.loaded_form("meta")
                stack.enter_context(
                    self._storages.standing_for([(twin, live) for _, twin, live in _pairs(module, form)])
                )
                stack.enter_context(module.holding(form))
            yield

    def why(self, storages: Collection[int]) -> str:
        """Why a tensor that fills these storages cannot be written in place; "" if nothing is against it here."""
        return next((module.why for module in self._of(storages) if module.packings is None), "")

    def most_parts(self, storages: Collection[int]) -> int:
        """Into how many parts, at most, an element of a tensor that fills these storages is taken apart."""
        packed = (self.packings.get(number) for number in storages)
        return max((CODES_A_WORD for packing in packed if isinstance(packing, CodePacking)), default=1)

    def holds(self, storages: Collection[int]) -> bool:
        """Whether all of these storages, and at least one, are of such modules."""
        return bool(storages) and set(storages) <= {number for own in self._numbers for number in own}

    def _of(self, storages: Collection[int]) -> Iterator[Repacked]:
        return (m for m, own in zip(self._modules, self._numbers) if not own.isdisjoint(storages))  # noqa: B905

    def load(
        self,
        storages: Mapping[str, Collection[int]],
        load_weights: Callable[[Any], Any],
        weights: Callable[[list[str]], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        """Load whole modules, one at a time.

        `storages`: by tensor, those that it fills, for all tensors to load; tensors of other modules are skipped.
        `weights`: reads tensors.
        """
        for module, own in zip(self._modules, self._numbers):  # noqa: B905 - Python 3.10
            names = [name for name, filled in storages.items() if not own.isdisjoint(filled)]
            if not names:
                continue
            device = next(iter(_pairs(module, module.loaded_form("meta"))))[2].device
            loaded = module.loaded_form(device)
            with module.holding(loaded):
                load_weights(weights(names))
            for name, made in module.process(loaded).items():
                getattr(module.module, name).data.copy_(made)


def _pairs(module: Repacked, form: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, a parameter as loaders expect it, the live one)."""
    return [(name, twin, getattr(module.module, name)) for name, twin in form.items()]
