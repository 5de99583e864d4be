"""Adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) as a node gives them to its engines. Needs no torch.

An engine holds the base model and any number of adapters, each in a slot of the swarm's layout (`codec.adapter`). A
linear layer that an adapter changes gives `x W^T + scaling * (x A^T) B^T`. The base's weights stay as they are, so an
adapter's new version changes nothing for sequences of the base or of other adapters.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import Layout, shared, state_root
from codec.adapter import AdapterConfig, slot_tensors
from codec.errors import PeerError, UsageError
from codec.layout import BLOCK_ELEMENTS
from node.engines.base import Version

__all__ = ["Factors", "GivenAdapter", "check_features", "factors_of", "map_weights", "scaling_of", "slot_root"]

_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9._-]+")
_WRITABLE: Final = fcntl.F_SEAL_WRITE if hasattr(fcntl, "F_SEAL_WRITE") else 0
_FEATURES: Final = {
    "use_dora": "DoRA (use_dora)",
    "lora_bias": "biases (lora_bias)",
    "modules_to_save": "whole modules (modules_to_save)",
    "layer_replication": "repeated layers (layer_replication)",
    "alora_invocation_tokens": "activation by tokens (alora_invocation_tokens)",
    "use_bdlora": "block-diagonal matrices (use_bdlora)",
    "use_qalora": "QALoRA (use_qalora)",
    "trainable_token_indices": "trained tokens (trainable_token_indices)",
    "target_parameters": "parameters of experts (target_parameters)",
    "fan_in_fan_out": "transposed layers (fan_in_fan_out)",
}
"""Settings of peft that change what an adapter computes, and that engines do not have."""


@dataclass(frozen=True, slots=True)
class GivenAdapter:
    """One version of an adapter.

    `fd`: sealed memory with the slot's weights tensor, bf16, all of it; it stays the caller's, and open for the
    duration of the call that gets it. `version`: the swarm's, that last changed the adapter. `root`: `part_root` of the
    slot, 32 bytes.
    """

    slot: int
    config: AdapterConfig
    fd: int
    version: Version
    root: bytes

    @property
    def name(self) -> str:
        return self.config.name


class Factors(NamedTuple):
    """The two matrices of one linear layer, as bits of bf16: `a` (rank, in), `b` (out, rank), both uint16."""

    module: str
    a: NDArray[np.uint16]
    b: NDArray[np.uint16]
    scaling: float


def map_weights(fd: int) -> NDArray[np.uint16]:
    """The slot's weights tensor, mapped for reading. Raises `PeerError` for memory that could still change."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PeerError("adapter: its weights are not in sealed memory") from error
    if seals & (fixed := fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _WRITABLE) != fixed:
        raise PeerError(f"adapter: its memory has the seals {seals:#x}, so its size or its bits could change")
    size = os.fstat(fd).st_size
    if not size or size % 2:
        raise PeerError(f"adapter: {size} bytes are no bf16 weights")
    return np.frombuffer(shared.map_readonly(fd), np.uint16)


def slot_root(slot: int, config: bytes, weights: NDArray[np.uint16]) -> bytes:
    """`codec.parts.part_root` of a slot with this content: the configuration tensor's bytes and the weights' bits."""
    layout = Layout(slot_tensors(slot, weights.size), ())
    step = BLOCK_ELEMENTS
    blocks = [config[at : at + step] for at in range(0, len(config), step)]
    digests = [blake3(block).digest() for block in blocks]
    digests += [blake3(weights[at : at + step].view(np.uint8).data).digest() for at in range(0, weights.size, step)]
    return state_root(layout.hash, np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32))


def factors_of(config: AdapterConfig, base: Layout, weights: NDArray[np.uint16]) -> Iterator[Factors]:
    """The matrices of each module, in the order of their names; views of `weights`.

    Raises `PeerError` for an adapter of another base, or larger than its slot.
    """
    tensors = config.tensors(base)
    for module, a, b in zip(config.modules, tensors[::2], tensors[1::2], strict=True):
        if b.offset + b.elements > weights.size:
            raise PeerError(f"adapter {config.name}: larger than its slot")
        views = [weights[t.offset : t.offset + t.elements].reshape(t.shape) for t in (a, b)]
        yield Factors(module.name, views[0], views[1], scaling_of(config, module.name, module.rank))


def scaling_of(config: AdapterConfig, module: str, rank: int) -> float:
    """What peft multiplies the output of a module of this rank by: alpha / rank, or alpha / sqrt(rank) with
    `use_rslora` (Kalajdzievski 2023, arXiv:2312.03732); `alpha_pattern` may name another alpha for a module."""
    alpha = config.alpha
    for key, other in _patterns(config).items():
        if module == key or module.endswith("." + key):
            alpha = float(other)
            break
    return alpha / sqrt(rank) if config.peft.get("use_rslora") else alpha / rank


def check_features(config: AdapterConfig) -> None:
    """Raises `UsageError` for an adapter that computes something else than LoRA does."""
    for setting, words in _FEATURES.items():
        if config.peft.get(setting):
            raise UsageError(f"The adapter {config.name} has {words}, which engines cannot serve: train it without.")
    if (bias := config.peft.get("bias", "none")) != "none":
        raise UsageError(f"The adapter {config.name} has biases (bias={bias!r}): train it with bias='none'.")
    start = config.peft.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in ("gaussian", "eva", "orthogonal", "mica", "lora_ga"):
        raise UsageError(
            f"The adapter {config.name} began by changing the base (init_lora_weights={start!r}): save it with peft's "
            "path_initial_model_for_weight_conversion, and publish that."
        )
    for key, alpha in _patterns(config).items():
        if not _PLAIN_KEY.fullmatch(key) or not isinstance(alpha, int | float):
            raise UsageError(
                f"The adapter {config.name} has an alpha_pattern {key!r} that is not the end of a module's name."
            )


def _patterns(config: AdapterConfig) -> dict[str, Any]:
    found = config.peft.get("alpha_pattern")
    return found if isinstance(found, dict) else {}
