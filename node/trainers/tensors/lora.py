"""Merges plain LoRA by its own arithmetic, `W + scaling * B A`, which equals peft's operation by operation.

For custom layers in LoRA's shape (`base_layer`, `lora_A`, `lora_B`, `scaling`), and for peft's layers that FSDP2
shards: each process merges its own rows. LoRA is from Hu et al. 2021, arXiv:2106.09685. Its variants are refused by
name.
"""

from collections.abc import Iterator
from typing import Any

from codec.errors import UsageError

__all__ = ["is_lora", "merged_layer"]


def is_lora(module: Any) -> bool:
    """Whether this is a layer in LoRA's shape."""
    return all(hasattr(module, part) for part in ("base_layer", "lora_A", "lora_B", "scaling"))


def merged_layer(name: str, layer: Any) -> Iterator[tuple[str, Any]]:
    """(name within the layer, tensor) of the base layer with every active adapter added.

    Sharded weights stay sharded. An adapter's A, which is small, is gathered on each process: a collective. Raises
    `UsageError` naming the layer for anything but plain LoRA of a linear layer.
    """
    if not is_lora(layer):
        raise _refusal(name, type(layer).__name__)
    for rest, tensor in layer.state_dict().items():
        if rest.startswith("base_layer."):
            rest = rest.removeprefix("base_layer.")
            yield rest, _merge(name, layer, tensor) if rest == "weight" else tensor
        elif not rest.startswith(("lora_A.", "lora_B.")):
            raise _refusal(f"{name}.{rest}", "more than A and B")


def _refusal(name: str, what: str) -> UsageError:
    return UsageError(
        f"{name} has an adapter that is not plain LoRA ({what}), and it is sharded or not peft's: merge it yourself, "
        "and publish an iterator of (checkpoint name, tensor)."
    )


def _merge(name: str, layer: Any, weight: Any) -> Any:
    """The weight with every active adapter added that is not merged into it yet, as peft's `merge` would add them.

    A new tensor, or the weight itself if there is no adapter to add.
    """
    if getattr(layer, "disable_adapters", False):
        raise UsageError(f"The adapters of {name} are switched off: switch them on before publishing.")
    already_merged = getattr(layer, "merged_adapters", None)
    if already_merged is None and getattr(layer, "merged", False):
        return weight
    active = getattr(layer, "active_adapters", None)
    for adapter in list(layer.lora_A) if active is None else active:
        if adapter not in layer.lora_A or adapter in (already_merged or ()):
            continue
        _check_plain(name, layer, adapter, weight)
        weight = _add(weight, layer.lora_B[adapter].weight, layer.lora_A[adapter].weight, layer.scaling[adapter])
    return weight


def _check_plain(name: str, layer: Any, adapter: str, weight: Any) -> None:
    a, b = layer.lora_A[adapter], layer.lora_B[adapter]
    if getattr(layer, "fan_in_fan_out", False):
        raise _refusal(name, "fan_in_fan_out")
    for flag in ("use_dora", "use_alora"):
        if (getattr(layer, flag, None) or {}).get(adapter):
            raise _refusal(name, flag)
    if adapter in (getattr(layer, "lora_variant", None) or {}):
        raise _refusal(name, f"{type(layer.lora_variant[adapter]).__name__}")
    if getattr(a, "bias", None) is not None or getattr(b, "bias", None) is not None:
        raise _refusal(name, "lora_bias")
    if not all(hasattr(part, "weight") for part in (a, b)) or weight.dim() != 2 or b.weight.dim() != 2:
        raise _refusal(name, "its weight is no matrix")


def _add(weight: Any, b: Any, a: Any, scaling: float) -> Any:
    """`weight + scaling * b @ a`, rounded once to the weight's dtype. `b`: (rows, r), `a`: (r, columns)."""
    if hasattr(weight, "placements"):
        return _add_sharded(weight, b, a, scaling)
    return (weight.detach() + _product(b.detach(), a.detach(), scaling)).to(weight.dtype)


def _add_sharded(weight: Any, b: Any, a: Any, scaling: float) -> Any:
    """`_add` on this process's rows of `weight`, which need its rows of `b`, sharded as the weight, and all of `a`."""
    from torch.distributed.tensor import DTensor

    if tuple(b.placements) != tuple(weight.placements):
        b = b.redistribute(weight.device_mesh, weight.placements)
    local = _add(weight.to_local(), b.to_local(), a.full_tensor(), scaling)
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )


def _product(b: Any, a: Any, scaling: float) -> Any:
    """`b @ a * scaling`. Half-precision adapters on a CPU are multiplied in float32 and rounded once, as in peft."""
    if b.device.type == "cpu" and b.dtype.itemsize < 4:
        return ((b.float() @ a.float()) * scaling).to(b.dtype)
    return (b @ a) * scaling
