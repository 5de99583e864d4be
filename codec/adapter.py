"""Adapters as two tensors of a layout: the bytes of an adapter's configuration, and its weights in one flat tensor.

A slot that no adapter uses is zeros. The configuration tensor, uint8 (65536,), little endian:

| bytes | |
|---|---|
| 0-3 | n, the length of the JSON, u32; 0: the slot is empty |
| 4-11 | the adapter's own version, u64: how many versions of the swarm have changed this adapter |
| 12 to 12 + n | canonical JSON: keys sorted, no spaces, UTF-8, not escaped |
| to the end | zeros |

The version has a fixed place, so that a step of the adapter changes few bytes of this tensor. The JSON is an object of
`name`, `base` (the hash of the base's layout, hex), `rank`, `alpha`, `modules` (sorted names; `[name, rank]` for a
module of another rank) and `peft` (the `adapter_config.json` that loaders need).

The weights tensor, BF16 (E,), holds for each module, in the order of `modules`, A of shape (r, in) and B of shape
(out, r), row by row; then zeros. `in` and `out` are those of the base's tensor `MODULE.weight`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, NamedTuple

from codec.bits import DTYPES
from codec.errors import PeerError, UsageError
from codec.layout import Layout, TensorSpec

__all__ = [
    "CONFIG_BYTES",
    "MAX_RANK",
    "MAX_SLOTS",
    "AdapterConfig",
    "AdapterModule",
    "AdapterSlots",
    "AdapterTensor",
    "is_adapter_name",
    "linear_layers",
    "slot_tensors",
]

MAX_SLOTS: Final = 64
MAX_RANK: Final = 1024
CONFIG_BYTES: Final = 1 << 16
"""Bytes of the configuration tensor: enough for about 1,000 modules."""

_HEAD_BYTES: Final = 12
_MAX_VERSION: Final = (1 << 64) - 1
_ALIGN: Final = 64
"""Elements to which the weights tensor is rounded up."""
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MODULE: Final = re.compile(r"[A-Za-z0-9._-]{1,256}")
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_NO_TARGET: Final = re.compile(r"embed|(^|\.)(wte|wpe|lm_head)\.")
"""Matrices that are not linear layers of the model's body: embeddings and the output head."""
_PEFT_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterSlots:
    """Room for adapters in a layout. `rank`: that each linear layer may have. `elements`: E, of each weights tensor."""

    count: int
    rank: int
    elements: int

    @classmethod
    def reserve(cls, base: Layout, count: int, rank: int) -> "AdapterSlots":
        """`count` slots, each with room for an adapter of all linear layers of `base` with this rank:
        E = sum over them of rank * (in + out), rounded up to 64.

        Linear layers are the tensors `NAME.weight` of two dimensions in a float type, without embeddings and lm_head.
        Raises `UsageError` for a count beyond 1 to 64, a rank beyond 1 to 1024, and a model without linear layers.
        """
        if not 1 <= count <= MAX_SLOTS:
            raise UsageError(f"A model has 1 to {MAX_SLOTS} slots for adapters, not {count}.")
        if not 1 <= rank <= MAX_RANK:
            raise UsageError(f"The rank of adapters is 1 to {MAX_RANK}, not {rank}.")
        width = _width(base)
        if not width:
            raise UsageError("This model has no linear layer that an adapter could change: leave out --adapters.")
        return cls(count, rank, -(-rank * width // _ALIGN) * _ALIGN)

    @classmethod
    def of(cls, layout: Layout) -> "AdapterSlots | None":
        """The slots that a layout has; None without any. Raises `PeerError` for slots that `reserve` does not make."""
        sizes = [tensor.shape[0] for tensor in layout.tensors if _WEIGHTS.fullmatch(tensor.name) and tensor.shape]
        if not sizes:
            return None
        width = _width(layout)
        rank = sizes[0] // width if width else 0
        found = cls(len(sizes), rank, sizes[0])
        if not 1 <= rank <= MAX_RANK or -(-rank * width // _ALIGN) * _ALIGN != found.elements:
            raise PeerError("layout.adapters: their size is not that of a rank")
        wanted = [tensor for slot in range(found.count) for tensor in slot_tensors(slot, found.elements)]
        if [tensor for tensor in layout.tensors if tensor.name.startswith("~adapter/")] != wanted:
            raise PeerError("layout.adapters: not slots from 0 on, all of one size")
        return found


_WEIGHTS: Final = re.compile(r"~adapter/[0-9]{2}/weights")


def is_adapter_name(text: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(text) is not None


def linear_layers(base: Layout) -> dict[str, tuple[int, int]]:
    """(out, in) of each linear layer of the base's body, by its name without `.weight`: matrices of a float type,
    without embeddings and the output head."""
    return {
        tensor.name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for tensor in base.tensors
        if len(tensor.shape) == 2
        and tensor.name.endswith(".weight")
        and DTYPES[tensor.dtype].is_float
        and not tensor.name.startswith("~")
        and not _NO_TARGET.search(tensor.name)
    }


def slot_tensors(slot: int, elements: int) -> tuple[TensorSpec, TensorSpec]:
    """The two tensors of a slot, in the order of their names."""
    return (
        TensorSpec(f"~adapter/{slot:02}/config", "U8", (CONFIG_BYTES,)),
        TensorSpec(f"~adapter/{slot:02}/weights", "BF16", (elements,)),
    )


class AdapterModule(NamedTuple):
    """A linear layer that an adapter changes. `name`: without `.weight`, as in the base's checkpoint."""

    name: str
    rank: int


class AdapterTensor(NamedTuple):
    """One tensor of an adapter. `name`: as peft saves it. `offset`: elements from the start of the weights tensor."""

    name: str
    shape: tuple[int, int]
    offset: int

    @property
    def elements(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the configuration tensor of a slot says.

    `base`: the hash (32 bytes) of the layout of the base, without other parts. `rank`: of the modules that name no
    other. `modules`: sorted by name, each once. `peft`: an object of JSON values. `version`: the adapter's own.
    """

    name: str
    base: bytes
    rank: int
    alpha: float
    modules: tuple[AdapterModule, ...]
    peft: Mapping[str, Any] = field(default_factory=dict)
    version: int = 0

    def to_bytes(self) -> bytes:
        """The only encoding of this configuration, `CONFIG_BYTES` long. Raises `UsageError` for what it cannot hold."""
        if (problem := self._problem()) is not None:
            raise UsageError(f"The adapter {self.name[:80]!r} cannot be published: {problem}.")
        try:
            body = self._json()
        except (ValueError, TypeError, RecursionError) as error:
            raise UsageError(f"The configuration of the adapter {self.name!r} cannot be JSON: {error}.") from error
        if _HEAD_BYTES + len(body) > CONFIG_BYTES:
            raise UsageError(
                f"The configuration of the adapter {self.name!r} has {len(body):,} bytes, at most "
                f"{CONFIG_BYTES - _HEAD_BYTES:,}: adapt fewer modules."
            )
        head = len(body).to_bytes(4, "little") + self.version.to_bytes(8, "little")
        return (head + body).ljust(CONFIG_BYTES, b"\0")

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> "AdapterConfig | None":
        """Decode and validate a configuration tensor; None for an empty slot. Raises `PeerError` naming the field."""
        data = bytes(data)
        if len(data) != CONFIG_BYTES:
            raise PeerError(f"adapter.config: {len(data)} bytes, not {CONFIG_BYTES}")
        length = int.from_bytes(data[:4], "little")
        if not length and not any(data):
            return None
        if not 2 <= length <= CONFIG_BYTES - _HEAD_BYTES:
            raise PeerError(f"adapter.length: {length}, at most {CONFIG_BYTES - _HEAD_BYTES}")
        body = data[_HEAD_BYTES : _HEAD_BYTES + length]
        if any(data[_HEAD_BYTES + length :]):
            raise PeerError("adapter.config: not zeros after the JSON")
        try:
            config = _read(json.loads(body), int.from_bytes(data[4:_HEAD_BYTES], "little"))
            canonical = config._json() == body
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PeerError("adapter.config: not the JSON of an adapter") from error
        if (problem := config._problem()) is not None:
            raise PeerError(f"adapter.config: {problem}")
        if not canonical:
            raise PeerError("adapter.config: not the canonical JSON")
        return config

    def tensors(self, base: Layout) -> tuple[AdapterTensor, ...]:
        """The adapter's tensors in the weights tensor, in order. `base`: the layout of the base.

        Raises `PeerError` for an adapter of another base, or with a module that the base does not have.
        """
        if base.hash != self.base:
            raise PeerError("adapter.base: belongs to another model")
        return tuple(self._tensors(base))

    def check_fits(self, base: Layout, slots: AdapterSlots) -> None:
        """Raise `UsageError` unless the adapter is of this base, and a slot has room for it."""
        if base.hash != self.base:
            raise UsageError(f"The adapter {self.name!r} is of another base model than this swarm's.")
        highest = max(module.rank for module in self.modules)
        if highest > slots.rank:
            raise UsageError(
                f"The adapter {self.name!r} has rank {highest}, and this swarm's slots have room for rank "
                f"{slots.rank}: train it with that rank, or start a swarm with --adapter-rank {highest}."
            )
        try:
            used = sum(tensor.elements for tensor in self._tensors(base))
        except PeerError as error:
            raise UsageError(f"The adapter {self.name!r} does not fit the base model: {error}.") from error
        if used > slots.elements:
            raise UsageError(
                f"The adapter {self.name!r} has {used:,} elements, and a slot has room for {slots.elements:,}: adapt "
                "fewer modules, or start a swarm with a higher --adapter-rank."
            )

    def _tensors(self, base: Layout) -> Iterator[AdapterTensor]:
        at = 0
        for module in self.modules:
            try:
                shape = base.tensor(f"{module.name}.weight").shape
            except KeyError:
                raise PeerError(f"adapter.modules: the base has no {module.name}") from None
            if len(shape) != 2:
                raise PeerError(f"adapter.modules: {module.name} is not a linear layer")
            for matrix, rows, columns in (("A", module.rank, shape[1]), ("B", shape[0], module.rank)):
                tensor = AdapterTensor(f"{_PEFT_PREFIX}{module.name}.lora_{matrix}.weight", (rows, columns), at)
                yield tensor
                at += tensor.elements

    def _json(self) -> bytes:
        """Canonical JSON. Raises `ValueError` or `TypeError` for values that JSON does not have."""
        fields = {
            "name": self.name,
            "base": self.base.hex(),
            "rank": self.rank,
            "alpha": float(self.alpha),
            "modules": [m.name if m.rank == self.rank else [m.name, m.rank] for m in self.modules],
            "peft": dict(self.peft),
        }
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        return text.encode()

    def _problem(self) -> str | None:
        """What is wrong with the fields, as the end of a sentence."""
        if not _NAME.fullmatch(self.name):
            return "its name must have 1 to 64 of the characters A-Z a-z 0-9 . _ -"
        if len(self.base) != 32:
            return "the hash of its base is not 32 bytes"
        if not math.isfinite(self.alpha):
            return "its alpha is not a finite number"
        if not 0 <= self.version <= _MAX_VERSION:
            return "its version is not a u64"
        if not self.modules:
            return "it adapts no module"
        if not all(1 <= rank <= MAX_RANK for rank in (self.rank, *(module.rank for module in self.modules))):
            return f"its rank must be 1 to {MAX_RANK}"
        if not all(_MODULE.fullmatch(module.name) for module in self.modules):
            return "a module's name must have 1 to 256 of the characters A-Z a-z 0-9 . _ -"
        names = [module.name for module in self.modules]
        if any(a >= b for a, b in pairwise(names)):
            return "its modules must be sorted by name, each once"
        return None


def _width(base: Layout) -> int:
    """Sum of in + out over the linear layers of the base."""
    return sum(sum(shape) for shape in linear_layers(base).values())


def _read(value: Any, version: int) -> AdapterConfig:
    """Raises `ValueError`, `TypeError` or `KeyError` for another shape; the caller checks the values."""
    if type(value) is not dict or len(value) != 6:
        raise ValueError("not an object of six fields")
    rank, alpha, base, peft = value["rank"], value["alpha"], value["base"], value["peft"]
    if type(value["name"]) is not str or type(rank) is not int or type(alpha) is not float or type(peft) is not dict:
        raise ValueError("a field has another type")
    if not _HEX.fullmatch(base):
        raise ValueError("base is not a hash")
    modules: list[AdapterModule] = []
    for module in value["modules"]:
        name, own = (module, rank) if type(module) is str else module
        if type(name) is not str or type(own) is not int:
            raise ValueError("a module has another shape")
        modules.append(AdapterModule(name, own))
    return AdapterConfig(value["name"], bytes.fromhex(base), rank, alpha, tuple(modules), peft, version)
