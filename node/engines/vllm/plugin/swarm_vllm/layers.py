"""A layer of vLLM whose kernel keeps weights otherwise than loaders fill them; see `repacked.Repacked`.

vLLM's reload remembers a layer's parameters as they were before its kernel processed them. A layer here can have such
parameters again, on memory that the running layer does not use, and the kernel's own code makes live weights of them.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

__all__ = ["VllmLayer", "learned"]

_log = logging.getLogger(__name__)


class VllmLayer(ABC):
    """One layer. Subclasses learn the order of its weights, and run its kernel's code."""

    packings: Any = None
    """See `repacked.Repacked`."""

    def __init__(self, module: Any, meta: Mapping[str, torch.Tensor], config: Any) -> None:
        """`meta`: its parameters before the kernel processed them, as vLLM's reload remembers them. `config`: vLLM's,
        which the kernel's code reads."""
        self.module, self._config = module, config
        self._meta = dict(meta)
        self.why = ""

    @property
    @abstractmethod
    def key(self) -> Any:
        """Layers with equal keys are repacked alike."""

    @abstractmethod
    def learn(self) -> None:
        """Set `packings`, or `why` there are none. Runs the kernel's code, which may raise anything."""

    def loaded_form(self, device: Any) -> dict[str, torch.Tensor]:
        """New parameters as loaders expect them, zeros; on device "meta", without memory."""
        empty = {name: torch.zeros(kept.shape, dtype=kept.dtype, device=device) for name, kept in self._meta.items()}
        return {name: self.as_parameter(name, tensor) for name, tensor in empty.items()}

    def as_parameter(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter on the memory of `tensor`, with the class, loader and axes of the layer's own one."""
        from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader
        from vllm.model_executor.model_loader.reload.meta import restore_layer_refs

        kept = self._meta[name]
        twin = torch.nn.Parameter(tensor.data, requires_grad=False)
        twin.__class__ = kept.__class__
        # vLLM's reload leaves loaders of its own there, which keep what they get for later
        loader = "_weight_loader" if "_weight_loader" in kept.__dict__ else "weight_loader"
        twin.__dict__.update(kept.__dict__ | {loader: _get_original_loader(kept)})
        return restore_layer_refs(twin, self.module)

    @contextmanager
    def holding(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """The layer has these parameters in place of its own, for loaders."""
        own = self.module._parameters
        self.module._parameters = own | dict(parameters)
        try:
            yield
        finally:
            self.module._parameters = own

    def has_whole(self, name: str) -> bool:
        """Whether the live weight `name` has its memory for itself, without gaps."""
        live = getattr(self.module, name)
        return live.is_contiguous() and live.untyped_storage().nbytes() == live.nbytes


Layer = TypeVar("Layer", bound=VllmLayer)


def learned(layers: Iterable[Layer], what: str) -> list[Layer]:
    """`layers`, with what one of each key has learned; none when the kernel's code fails. `what`: they are, for the
    log."""
    firsts: dict[Any, Layer] = {}
    found: list[Layer] = []
    for layer in layers:
        first = firsts.setdefault(layer.key, layer)
        try:
            if first is layer:
                layer.learn()
        except Exception as error:  # the kernel's code may raise anything, for lack of memory among others
            _log.warning("swarm: %s are left to vLLM's own reload: %s: %s", what, type(error).__name__, error)
            return []
        layer.packings, layer.why = first.packings, first.why
        found.append(layer)
    return found
