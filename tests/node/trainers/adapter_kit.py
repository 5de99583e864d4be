"""A small base with linear layers, adapters of it, and what a seed with slots must hold of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from seed_kit import FakeSeed, random_replica

from codec import Layout, Replica, TensorSpec
from codec.adapter import AdapterConfig, AdapterSlots
from codec.parts import Part, base_layout, extended, part_layout
from node.trainers.tensors.adapter_slot import tensors_in

BASE = Layout(
    (
        TensorSpec("embed.weight", "BF16", (64, 32)),
        TensorSpec("layers.0.down.weight", "BF16", (32, 48)),
        TensorSpec("layers.0.up.weight", "BF16", (48, 32)),
        TensorSpec("norm.weight", "BF16", (32,)),
    )
)
MODULES = {"layers.0.down": (32, 48), "layers.0.up": (48, 32)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down", "up"]}


class LoraLinear(torch.nn.Module):
    """A linear layer in peft's shape, on the weight `base`."""

    def __init__(self, base: torch.Tensor) -> None:
        super().__init__()
        out, in_ = base.shape
        self.base_layer = torch.nn.Linear(in_, out, bias=False)
        self.base_layer.weight = torch.nn.Parameter(base, requires_grad=False)
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(in_, 4, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(4, out, bias=False)})
        self.scaling = {"default": 2.0}


def base_weights(version: int) -> dict[str, torch.Tensor]:
    """About 1 % of the base differs from one version to the next."""
    replica = random_replica(BASE)
    found = {}
    for tensor in BASE.tensors:
        bits = replica.bits(tensor.name).copy()
        for v in range(1, version + 1):
            bits[v % 3 :: 97] += 1
        found[tensor.name] = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).view(tensor.shape)
    return found


def adapter(seed: int, rank: int = 4, modules: Any = MODULES) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """(peft config, tensors) in float32."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out, in_) in modules.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, in_, generator=random)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(out, rank, generator=random)
    return CONFIG | {"r": rank}, tensors


def saved(folder: Path, source: tuple[dict[str, Any], dict[str, torch.Tensor]]) -> Path:
    """The folder that peft would save."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(source[0]))
    save_file(source[1], folder / "adapter_model.safetensors")
    return folder


def seed_with_slots(count: int = 3, rank: int = 8) -> FakeSeed:
    base = random_replica(BASE)
    replica = Replica.create(extended(BASE, AdapterSlots.reserve(BASE, count, rank)))
    for block in range(BASE.n_blocks):
        replica._writable(block)[:] = base.block(block)
    replica.rehash()
    return FakeSeed(replica)


def adapters_of(seed: FakeSeed) -> dict[str, tuple[int, AdapterConfig]]:
    """(slot, configuration) of each adapter that the nodes hold, by name. Checks that nodes and seed hold the same."""
    assert seed.receiver.root == seed.replica.root
    assert seed.receiver.rehash() == []
    found = {}
    slots = AdapterSlots.of(seed.replica.layout)
    assert slots is not None
    for slot in range(slots.count):
        config = AdapterConfig.from_bytes(seed.receiver.bits(f"~adapter/{slot:02}/config").tobytes())
        if config is not None:
            assert config.name not in found
            found[config.name] = slot, config
        else:
            assert not seed.receiver.bits(f"~adapter/{slot:02}/weights").any()
    return found


def assert_adapter(seed: FakeSeed, name: str, version: int, source: Any) -> None:
    """The nodes hold this adapter, rounded to bfloat16, as its own version `version`."""
    slot, config = adapters_of(seed)[name]
    assert config.version == version
    base = base_layout(seed.replica.layout)
    held = tensors_in(config, seed.receiver.bits(f"~adapter/{slot:02}/weights"), base)
    assert set(held) == set(source[1])
    for tensor, values in source[1].items():
        want = values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(held[tensor], want), tensor
    used = sum(bits.size for bits in held.values())
    assert not seed.receiver.bits(f"~adapter/{slot:02}/weights")[used:].any(), "the rest of the slot is zeros"


def blocks_of_slot(seed: FakeSeed, slot: int) -> range:
    return part_layout(seed.replica.layout, Part.adapter(slot)).blocks
