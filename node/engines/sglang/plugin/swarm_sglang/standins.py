"""What SGLang imports on every machine, and what the released wheels lack on a machine without a GPU.

- `sgl_kernel`: the wheel has objects for CUDA only. SGLang's paths for CPUs import some names of it and call none of
  them with the attention backend `torch_native`. Here every name can be imported, and calling one raises an error.
- `torchvision`: the wheel's library needs CUDA, so two of its operators do not exist when it describes them. Here they
  are declared, without an implementation.

Used only where `SGLANG_USE_CPU_ENGINE` is 1, and only for what cannot be imported.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["install"]

_PACKAGE = "sgl_kernel"
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []
"""A library's operators go when it is collected."""


class _Kernel:
    """A kernel that this machine does not have, or a namespace of them."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Kernel":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise RuntimeError(f"{self._name} is a kernel for GPUs, and this machine has none")


class _Finder(MetaPathFinder, Loader):
    """Finds `sgl_kernel` and all modules in it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        ours = fullname.partition(".")[0] == _PACKAGE
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)

        def kernel(name: str) -> _Kernel:
            if name.startswith("__"):
                raise AttributeError(name)
            return _Kernel(f"{spec.name}.{name}")

        module.__dict__["__getattr__"] = kernel
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Make the imports of this process work. Call it before SGLang is imported."""
    import torch

    if importlib.util.find_spec(_PACKAGE) is None:
        sys.meta_path.append(_Finder())
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        if not hasattr(torch.ops.torchvision, operator.partition("(")[0]):
            library.define(operator)
    _kept.append(library)
