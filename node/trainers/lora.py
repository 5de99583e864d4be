"""LoRA adapters, merged on the way out: nodes sample from `W + scaling * B A`, while the trainer keeps W, A and B.

Merging in place and unmerging again would leave W changed by rounding, and with it everything that is trained after.
So each merged weight is made beside the model, one at a time, and thrown away once it is copied: the model is never
touched. The arithmetic is that of `peft`'s own merge, operation by operation.
"""

from collections.abc import Iterator
from typing import Any

from codec.errors import UsageError

__all__ = ["has_lora", "merged"]

_PEFT_PREFIX = "base_model.model."


def has_lora(model: Any) -> bool:
    """Whether some layer of this module carries LoRA adapters, in peft's shape: `base_layer`, `lora_A`, `lora_B`."""
    return any(_is_lora(module) for module in model.modules()) if hasattr(model, "modules") else False


def merged(model: Any, *, names_only: bool = False) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the model's state, adapters merged and gone, names as without them.

    Sharded weights stay sharded; of an adapter's A, which is small, each process sees the whole. `names_only`: the
    weights as they are, for whoever looks at names, shapes and shards alone. Raises `UsageError` for adapters other
    than plain LoRA.
    """
    layers = {name: module for name, module in model.named_modules() if _is_lora(module)}
    for name, tensor in model.state_dict().items():
        owner = next((layer for layer in _owners(name) if layer in layers), None)
        if owner is None:
            yield _plain(name), tensor
            continue
        rest = name[len(owner) + 1 :]
        if rest.startswith("base_layer."):
            rest = rest.removeprefix("base_layer.")
            adapted = rest == "weight" and not names_only
            yield _plain(f"{owner}.{rest}"), _merge(owner, layers[owner], tensor) if adapted else tensor
        elif not rest.startswith(("lora_A.", "lora_B.")):
            raise UsageError(f"{name} is of an adapter that is not plain LoRA: merge it yourself, and publish that.")


def _is_lora(module: Any) -> bool:
    return all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B", "scaling"))


def _owners(name: str) -> Iterator[str]:
    """The modules that a parameter may belong to, innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _plain(name: str) -> str:
    return name.removeprefix(_PEFT_PREFIX)


def _merge(name: str, layer: Any, weight: Any) -> Any:
    """The weight with every active adapter added, as a tensor of its own (or the weight itself, if there is none)."""
    active = getattr(layer, "active_adapters", None)
    if getattr(layer, "disable_adapters", False) or getattr(layer, "merged", False):
        return weight
    for adapter in list(layer.lora_A) if active is None else active:
        if adapter not in layer.lora_A:
            continue
        if getattr(layer, "fan_in_fan_out", False) or (getattr(layer, "use_dora", None) or {}).get(adapter):
            raise UsageError(f"{name} has an adapter that is not plain LoRA: merge it yourself, and publish that.")
        weight = _add(weight, layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, layer.scaling[adapter])
    return weight


def _add(weight: Any, b: Any, a: Any, scaling: float) -> Any:
    """`weight + scaling * b @ a`, rounded once to the weight's dtype."""
    if hasattr(weight, "placements"):
        return _add_sharded(weight, b, a, scaling)
    return (weight.detach() + _product(b.detach(), a.detach()) * scaling).to(weight.dtype)


def _add_sharded(weight: Any, b: Any, a: Any, scaling: float) -> Any:
    """Row by row: this process's rows of `weight` need its rows of `b`, cut as the weight's are, and all of `a`."""
    from torch.distributed.tensor import DTensor

    if tuple(b.placements) != tuple(weight.placements):
        b = b.redistribute(weight.device_mesh, weight.placements)
    local = _add(weight.to_local(), b.to_local(), a.full_tensor(), scaling)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _product(b: Any, a: Any) -> Any:
    """Half-precision adapters on a CPU are multiplied in float32, as peft does."""
    if b.device.type == "cpu" and b.dtype.itemsize < 4:
        return (b.float() @ a.float()).to(b.dtype)
    return b @ a
