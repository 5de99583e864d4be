"""The model as its loader knows it: vLLM puts a wrapper around each layer that an adapter may change.

The loader finds weights by the names of parameters, and a wrapper changes these. While a block runs, every wrapper's
place is taken by the layer in it. No step may run meanwhile.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is installed in another environment.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["reloading", "unwrapped"]


@contextmanager
def unwrapped(model: Any) -> Iterator[None]:
    """`model` without wrappers while the block runs. Does nothing for a vLLM without adapters."""
    places = _wrappers(model)
    for parent, name, wrapper in places:
        parent._modules[name] = wrapper.base_layer
    try:
        yield
    finally:
        for parent, name, wrapper in places:
            parent._modules[name] = wrapper


def _wrappers(model: Any) -> list[tuple[Any, str, Any]]:
    """(parent, name in it, wrapper) of each wrapper."""
    if getattr(model, "lora_manager", None) is None:
        return []
    from vllm.lora.layers import BaseLayerWithLoRA

    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, BaseLayerWithLoRA) and hasattr(child, "base_layer")
    ]


@contextmanager
def reloading(worker: Any) -> Iterator[None]:
    """vLLM may reload the base while the block runs: its adapters stay, because their weights are their own."""
    runner = worker.model_runner
    with unwrapped(runner.get_model()):
        own = runner.__dict__.get("reset_lora_state")
        runner.reset_lora_state = _keep
        try:
            yield
        finally:
            if own is None:
                del runner.reset_lora_state
            else:
                runner.reset_lora_state = own


def _keep() -> None:
    """Stands in for vLLM's function that forgets all adapters when the base is loaded."""
