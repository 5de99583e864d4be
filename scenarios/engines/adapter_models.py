"""Made-up adapters to test engines with: random matrices for chosen modules of a base."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from codec import Layout, shared
from codec.adapter import AdapterConfig, AdapterModule, AdapterSlots
from node.engines.adapters import GivenAdapter, factors_of, slot_root
from node.engines.base import Version

__all__ = ["MadeAdapter", "make_adapter", "modules_of"]

_SPREAD: Final = 0.5
"""Standard deviation of a module's change, as a share of what its input has: large enough that greedy text changes."""


@dataclass(frozen=True)
class MadeAdapter:
    """An adapter in memory. `weights`: uint16 (E,), the bits of its slot's weights tensor."""

    base: Layout
    config: AdapterConfig
    weights: NDArray[np.uint16]

    @property
    def name(self) -> str:
        return self.config.name

    def root(self, slot: int) -> bytes:
        return slot_root(slot, self.config.to_bytes(), self.weights)

    @contextmanager
    def memory(self) -> Iterator[int]:
        """A descriptor of sealed memory with the weights, closed afterwards."""
        fd, memory = shared.reserve("swarm-adapter", self.weights.nbytes)
        assert fd is not None
        memory[:] = self.weights.tobytes()
        memory.close()
        shared.seal_forever(fd)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def given(self, slot: int, version: Version) -> Iterator[GivenAdapter]:
        """The adapter as an engine gets it."""
        with self.memory() as fd:
            yield GivenAdapter(slot, self.config, fd, version, self.root(slot))

    def step(self, seed: int, share: float = 0.1) -> "MadeAdapter":
        """The next version: this share of the weights moves by up to 10 %."""
        random = np.random.default_rng(seed)
        values = (self.weights.astype(np.uint32) << 16).view(np.float32)
        values = np.where(random.random(values.size) < share, values * random.uniform(0.9, 1.1, values.size), values)
        config = replace(self.config, version=self.config.version + 1)
        return MadeAdapter(self.base, config, _bf16(values.astype(np.float32)))

    def save(self, folder: Path) -> Path:
        """Save it as peft does: `adapter_config.json` and `adapter_model.safetensors`."""
        import torch
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for factors in factors_of(self.config, self.base, self.weights):
            for letter, bits in (("A", factors.a), ("B", factors.b)):
                name = f"base_model.model.{factors.module}.lora_{letter}.weight"
                tensors[name] = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(dict(self.config.peft)))
        return folder


def modules_of(base: Layout, targets: Sequence[str]) -> list[str]:
    """The base's linear layers whose last name is one of `targets`, sorted."""
    names = [tensor.name.removesuffix(".weight") for tensor in base.tensors if tensor.name.endswith(".weight")]
    return sorted(name for name in names if name.rpartition(".")[2] in targets)


def make_adapter(
    base: Layout,
    slots: AdapterSlots,
    name: str,
    *,
    targets: Sequence[str],
    rank: int,
    alpha: float | None = None,
    ranks: Mapping[str, int] | None = None,
    seed: int = 0,
    **peft: Any,
) -> MadeAdapter:
    """An adapter of all modules named `targets`. `alpha`: None for twice the rank. `ranks`: by target, other ranks."""
    alpha, ranks = 2.0 * rank if alpha is None else alpha, ranks or {}
    modules = tuple(AdapterModule(m, ranks.get(m.rpartition(".")[2], rank)) for m in modules_of(base, targets))
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
        "target_modules": sorted(targets), "bias": "none", "rank_pattern": dict(ranks), **peft,
    }  # fmt: skip
    config = AdapterConfig(name, base.hash, rank, alpha, modules, settings)
    config.check_fits(base, slots)
    weights = np.zeros(slots.elements, np.float32)
    random = np.random.default_rng(seed)
    for a, b in zip(*[iter(config.tensors(base))] * 2, strict=True):
        fan_in, own = a.shape[1], a.shape[0]
        weights[a.offset : a.offset + a.elements] = random.normal(0, fan_in**-0.5, a.elements)
        weights[b.offset : b.offset + b.elements] = random.normal(0, _SPREAD * own**-0.5 * own / alpha, b.elements)
    return MadeAdapter(base, config, _bf16(weights))


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 values rounded to the nearest bf16, ties to even."""
    wide = values.view(np.uint32)
    return ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
