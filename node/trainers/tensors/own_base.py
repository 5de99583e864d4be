"""Finds out whether an adapter was trained on another base than the swarm's, as far as this process has that base.

A model with adapters has its base in memory. The config of a pair or of a folder names the base's folder, which may be
on this machine. Where neither is at hand, only the shapes can tell (`node.trainers.tensors.adapter_slot`).
"""

import os
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec.base_sample import agreement, sample_places
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from codec.layout import Layout
from node.trainers.tensors.naming import plain_name
from node.trainers.tensors.rounding import bring, can_bring

__all__ = ["check_base"]

_ENOUGH: Final = 64
"""Fewer compared values say nothing."""

_Values = Callable[[str], NDArray[np.float32] | None]


def check_base(
    name: str,
    source: Any,
    peft: Any,
    sample: bytes,
    base: Layout,
    checkpoint_name: Callable[[Any], Callable[[str], str]],
) -> None:
    """Raises `UsageError` when the adapter `name` in `source` is of another base than that of `sample`.

    `source`: as `node.trainers.tensors.plain_lora.plain_lora` takes it. `peft`: the adapter's peft config. `sample`: by
    `codec.base_sample`, of the swarm's base, whose layout is `base`; empty: nothing is compared.
    `checkpoint_name(module)`: how the names of that module's parameters become the base checkpoint's.
    """
    values = _of_model(source, base, checkpoint_name) if hasattr(source, "named_parameters") else _of_folder(peft, base)
    if not sample or values is None:
        return
    compared, agree = agreement(sample, base, values)
    if compared >= _ENOUGH and 2 * agree < compared:
        raise UsageError(
            f"The adapter {name!r} is of another base: of {compared:,} weights of its base, {agree:,} have about the "
            "value that they have in this swarm's base. Train it on the base that the seed was started with."
        )


def _of_model(model: Any, base: Layout, checkpoint_name: Callable[[Any], Callable[[str], str]]) -> _Values:
    held = dict(_weights(model, checkpoint_name(model)))

    def values(layer: str) -> NDArray[np.float32] | None:
        weight, spec = held.get(f"{layer}.weight"), base.tensor(f"{layer}.weight")
        if weight is None or tuple(weight.shape) != spec.shape:
            return None
        if hasattr(weight, "placements") or weight.is_meta or not weight.is_floating_point() or weight.itemsize < 2:
            return None  # sharded, not there, or quantized when it was loaded
        import torch

        rows, columns = np.divmod(sample_places(spec.elements), spec.shape[1])
        at = [torch.from_numpy(index).to(weight.device) for index in (rows, columns)]
        return weight.detach()[at[0], at[1]].to("cpu", torch.float32).numpy()

    return values


def _weights(model: Any, in_checkpoint: Callable[[str], str]) -> Iterator[tuple[str, Any]]:
    """(name in the checkpoint, parameter) of what is a single tensor of the checkpoint."""
    for name, weight in model.named_parameters():
        try:
            yield in_checkpoint(plain_name(name).replace(".base_layer.", ".")), weight
        except UsageError:
            continue  # several fused, or an adapter's own


def _of_folder(peft: Any, base: Layout) -> _Values | None:
    """The values of the base's folder that the config names; None: it is not on this machine."""
    folder = peft.get("base_model_name_or_path")
    if not isinstance(folder, str) or not os.path.isdir(folder):  # which, unlike pathlib, takes any text
        return None
    try:
        checkpoint = Checkpoint.open(folder)
    except UsageError:
        return None
    stored = set(checkpoint.names)

    def values(layer: str) -> NDArray[np.float32] | None:
        name = f"{layer}.weight"
        spec = checkpoint.layout.tensor(name) if name in stored else None
        if spec is None or spec.shape != base.tensor(name).shape or not can_bring(spec.dtype, "F32"):
            return None
        bits = checkpoint.bits(name)[sample_places(spec.elements)]
        return bring(name, bits, spec.dtype, "F32").view(np.float32)

    return values
