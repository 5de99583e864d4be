"""An adapter as the two tensors of its slot, and back: see `codec.adapter` for the form."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from codec.adapter import CONFIG_BYTES, AdapterConfig, AdapterModule, AdapterSlots, is_adapter_name, linear_layers
from codec.bits import Bits
from codec.errors import UsageError
from codec.layout import Layout
from node.trainers.tensors.plain_lora import MERGED, PlainLora

__all__ = ["check_name", "fill_slot", "slot_bits", "slot_config", "tensors_in"]

_LOADERS_NEED: Final = (
    "task_type", "target_modules", "lora_dropout", "bias",
)  # fmt: skip
"""Fields of a peft config that loaders ask for. Those of rank and alpha are set anew; the base's folder stays here."""


def check_name(name: str) -> None:
    """Raises `UsageError` for a name that no adapter may have."""
    if not is_adapter_name(name):
        raise UsageError(f"adapter={name!r}: an adapter's name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")


def slot_config(adapter: PlainLora, name: str, base: Layout, slots: AdapterSlots) -> AdapterConfig:
    """The configuration of an adapter in a slot; its version is 0. `base`: the layout of the base without other parts.

    Its `peft` has the exact names of modules in `rank_pattern` and `alpha_pattern`, and not regular expressions. Raises
    `UsageError` for an adapter of another base, or one for which the slots have no room.
    """
    check_name(name)
    linear = linear_layers(base)
    for module in adapter.modules:
        found = (module.b.shape[0], module.a.shape[1])
        wanted = linear.get(module.name)
        if wanted is None:
            raise UsageError(
                f"The adapter {name!r} adapts {module.name}, which is no linear layer of this swarm's base (embeddings "
                f"and the output head are none): train it on this base, or {MERGED}."
            )
        if found != wanted:
            raise UsageError(
                f"The adapter {name!r} is of another base: its {module.name} is {found[0]} x {found[1]}, and that of "
                f"this swarm's base {wanted[0]} x {wanted[1]}. Train it on the base that the seed was started with."
            )
    ranks = [module.rank for module in adapter.modules]
    rank = max(set(ranks), key=lambda value: (ranks.count(value), value))
    alphas = [module.alpha for module in adapter.modules]
    alpha = max(set(alphas), key=lambda value: (alphas.count(value), value))
    peft: dict[str, Any] = {key: adapter.peft[key] for key in _LOADERS_NEED if key in adapter.peft}
    peft |= {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": adapter.rslora,
        "rank_pattern": {module.name: module.rank for module in adapter.modules if module.rank != rank},
        "alpha_pattern": {module.name: module.alpha for module in adapter.modules if module.alpha != alpha},
    }
    modules = tuple(AdapterModule(module.name, module.rank) for module in adapter.modules)
    config = AdapterConfig(name, base.hash, rank, float(alpha), modules, peft)
    config.check_fits(base, slots)
    return config


def slot_bits(adapter: PlainLora, config: AdapterConfig, slots: AdapterSlots) -> tuple[Bits, Bits]:
    """(configuration, uint8 (65536,); weights, uint16 (E,)) of the slot."""
    raw, weights = np.zeros(CONFIG_BYTES, np.uint8), np.zeros(slots.elements, np.uint16)
    fill_slot(adapter, config, raw, weights)
    return raw, weights


def fill_slot(adapter: PlainLora, config: AdapterConfig, raw: Bits, weights: Bits) -> None:
    """Write the slot's two tensors, of the shapes that `slot_bits` gives."""
    raw[:] = np.frombuffer(config.to_bytes(), np.uint8)
    at = 0
    for module in adapter.modules:
        for matrix in (module.a, module.b):
            weights[at : at + matrix.size] = matrix.reshape(-1)
            at += matrix.size
    weights[at:] = 0


def tensors_in(config: AdapterConfig, weights: Bits, base: Layout) -> Mapping[str, Bits]:
    """The adapter's tensors by peft's names: uint16, the bits in bfloat16, views of `weights`.

    Raises `PeerError` for an adapter of another base.
    """
    return {
        tensor.name: weights[tensor.offset : tensor.offset + tensor.elements].reshape(tensor.shape)
        for tensor in config.tensors(base)
    }
