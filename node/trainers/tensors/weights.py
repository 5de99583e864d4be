"""A trainer's tensors -> the bits of the checkpoint, in memory laid out like a replica.

The layout decides: its names, its dtypes, tied tensors once. What a difference of dtype means is decided here, for each
pair: float32 masters of a bfloat16 or float16 tensor are rounded (to nearest, ties to even, as torch does), half
precision in the place of float32 is widened, which is exact; every other difference is refused, because it would not be
what the trainer computes with. Tensors may be torch's, on any device, sharded (DTensor: each rank copies what it
holds), or numpy arrays of bits.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from codec.bits import Bits
from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.trainers.ranks.copies import Copies
from node.trainers.ranks.ownership import Ownership, Part
from node.trainers.tensors.naming import Held, Naming, all_at_hand, is_sharded

__all__ = ["Copier", "check_names", "is_sharded"]

_TORCH_NAMES: Final = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I8": "int8", "U8": "uint8",
    "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip
_ROUNDED: Final = {("BF16", "float32"), ("F16", "float32")}
"""(checkpoint, trainer): masters, whose rounding is what FSDP's forward and `.to()` compute with."""
_WIDENED: Final = {("F32", "bfloat16"), ("F32", "float16")}
"""A trainer that loaded a float32 tensor in half precision: its values are float32 values."""


def check_names(layout: Layout, model: Any) -> dict[str, Part | None]:
    """What this process holds of the model, by checkpoint name. Adapters are merged as they are in a publish.

    Raises `UsageError` naming the first tensor that is missing, unknown, or of another shape or dtype, or the adapter
    that cannot be merged.
    """
    naming = Naming(layout)
    held: dict[str, Part | None] = dict.fromkeys(naming.unused(model))
    seen = set(held)
    tied: dict[str, Any] = {}
    for each in naming.held(model):
        spec = _spec(layout, each.name)
        _check(spec, each)
        held[each.name] = each.part
        seen.add(spec.name)
        if spec.aliases and not _same_bits(spec, tied.setdefault(spec.name, each.local), each.local):
            raise _untied(spec, each.name)
    _check_complete(layout, seen)
    return held


SMALL_BYTES: Final = 1 << 16
BATCH_TENSORS: Final = 256


class Copier:
    """Writes one rank's part of each version into the shared copies."""

    def __init__(
        self, layout: Layout, copies: Copies, shares: Ownership, rank: int, now: Callable[[str], Bits] | None = None
    ) -> None:
        """`now(name)`: the bits that the swarm has of a tensor, for those that the model has no use for."""
        self._layout, self._copies, self._shares, self._rank = layout, copies, shares, rank
        self._naming, self._now = Naming(layout), now
        self._views: dict[tuple[int, str], tuple[Part, Any]] = {}
        for slot in range(2):  # the first touch of a page costs more than the copy: here, not in the first steps
            for spec in layout.tensors:
                part = shares.writes(rank, spec.name)
                if part is not None:
                    _rows(copies.tensor(slot, spec), spec, part)[...] = 0

    def fill(self, slot: int, publish: int, source: Any, on_written: Callable[[], None] = lambda: None) -> None:
        """Copy what is ours of every tensor of `source` (see `named_tensors`). Afterwards the source may change.
        `on_written()`: called when the first tensor, or all, can be read.

        Says which tensors are written as they are, where they come from a device: encoding goes on beside the copying
        then. From this host's memory the copy takes less time than that would save it. Raises `UsageError` naming the
        tensor when one is missing, unknown, or of another shape, dtype or sharding.
        """
        with _no_grad():  # a DTensor's local part is a function of autograd's otherwise
            self._fill(slot, publish, source, on_written)
        self._copies.tell(slot, self._rank, publish, self._shares.tensors_of(self._rank))
        self._copies.finish(slot, self._rank, publish)
        on_written()

    def _fill(self, slot: int, publish: int, source: Any, on_written: Callable[[], None]) -> None:
        seen: set[str] = set()
        small = _Batch()
        batches = all_at_hand(source)
        for each in self._naming.held(source):
            spec = _spec(self._layout, each.name)
            _check(spec, each)
            ours = self._shares.writes(self._rank, spec.name)
            if spec.name in seen:
                if ours is not None:
                    small.copy()
                    self._check_tie(slot, spec, each, ours)
                continue
            seen.add(spec.name)
            if ours is None:
                continue
            if each.part is not None and each.part != ours:
                raise UsageError(f"{each.name} is sharded otherwise than when the trainer attached: attach again.")
            if batches and small.takes(spec, each.local):
                small.add(self._rows(slot, spec, ours), each.local)
                continue
            self._write(slot, spec, each, ours)
            if getattr(each.local, "is_cuda", False):
                self._copies.tell(slot, self._rank, publish, self._shares.index(each.name))
                on_written()
        small.copy()
        seen |= self._keep(slot, self._naming.unused(source))
        _check_complete(self._layout, seen)

    def _keep(self, slot: int, names: frozenset[str]) -> frozenset[str]:
        """What the model has no use for stays as the swarm has it."""
        for name in names:
            spec = self._layout.tensor(name)
            part = self._shares.writes(self._rank, name)
            if part is not None and self._now is not None:
                whole = self._now(name).reshape(spec.shape)
                here = (slice(None),) * part.dim + (slice(part.start, part.start + part.length),)
                _rows(self._copies.tensor(slot, spec), spec, part)[...] = whole[here] if spec.shape else whole
        return names

    def _write(self, slot: int, spec: TensorSpec, each: Held, part: Part) -> None:
        local = each.local
        if isinstance(local, np.ndarray):
            self._copies.tensor(slot, spec).view(spec.type.bits)[:] = local.reshape(-1)
            return
        rows = self._rows(slot, spec, part)
        rows.copy_(local.detach())
        if spec.dtype == "F16" and local.dtype.itemsize > 2 and bool((rows.isinf() & local.isfinite().cpu()).any()):
            raise UsageError(f"{each.name} has values beyond float16's 65,504: start the swarm from a bfloat16 base.")

    def _rows(self, slot: int, spec: TensorSpec, part: Part) -> Any:
        """The memory of a part, as torch's tensor; the same at each publish, and four views to make."""
        key = slot, spec.name
        known = self._views.get(key)
        if known is None or known[0] != part:
            known = self._views[key] = part, _torch_rows(self._copies.tensor(slot, spec), spec, part)
        return known[1]

    def _check_tie(self, slot: int, spec: TensorSpec, each: Held, part: Part) -> None:
        """A second name of a tied tensor must hold the same bits, or the tie was broken in training."""
        there, local = self._copies.tensor(slot, spec), each.local
        if isinstance(local, np.ndarray):
            same = np.array_equal(there.view(spec.type.bits), local.reshape(-1))
        else:
            mine = self._rows(slot, spec, part)
            same = _same_bits(spec, mine, local)
        if not same:
            raise _untied(spec, each.name)


class _Batch:
    """Small tensors of host memory, which are copied many at a call: a call for each takes longer than the copy."""

    def __init__(self) -> None:
        self._into: list[Any] = []
        self._from: list[Any] = []

    def takes(self, spec: TensorSpec, local: Any) -> bool:
        """Not what comes from a device, and not what has to be looked at after it was rounded."""
        return (
            not isinstance(local, np.ndarray)
            and local.device.type == "cpu"
            and local.nbytes <= SMALL_BYTES
            and (spec.dtype != "F16" or local.dtype.itemsize <= 2)
        )

    def add(self, into: Any, local: Any) -> None:
        self._into.append(into)
        self._from.append(local)
        if len(self._into) >= BATCH_TENSORS:
            self.copy()

    def copy(self) -> None:
        """Whatever was added."""
        if self._into:
            import torch

            torch._foreach_copy_(self._into, self._from)  # pyright: ignore[reportPrivateImportUsage]
            self._into, self._from = [], []


def _no_grad() -> AbstractContextManager[Any]:
    torch = sys.modules.get("torch")  # bits of numpy's need none
    return nullcontext() if torch is None else torch.no_grad()


def _same_bits(spec: TensorSpec, one: Any, other: Any) -> bool:
    """Whether two tensors are the same in the checkpoint's dtype."""
    if one is other or one is None or other is None:
        return one is other
    if isinstance(one, np.ndarray):
        return np.array_equal(one.reshape(-1), other.reshape(-1))
    import torch

    if one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.shape == other.shape:
        return True
    kind = getattr(torch, _TORCH_NAMES[spec.dtype])
    return torch.equal(*(_as_bytes(tensor.detach().to("cpu", kind)) for tensor in (one, other)))


def _untied(spec: TensorSpec, name: str) -> UsageError:
    names = " and ".join(sorted({spec.name, *spec.aliases})) if name == spec.name else f"{name} and {spec.name}"
    return UsageError(
        f"{names} are tied in the base checkpoint and differ in the model: start the swarm from a checkpoint in which "
        "they are stored apart (tie_word_embeddings false)."
    )


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _spec(layout: Layout, name: str) -> TensorSpec:
    try:
        return layout.tensor(name)
    except KeyError as error:
        raise UsageError(
            f"The model has a tensor {name} that the base checkpoint lacks. Give Swarm.attach the folder that training "
            "started from, and publish the model itself, whose fused parameters are known, or an iterator of "
            "(checkpoint name, tensor)."
        ) from error


def _check(spec: TensorSpec, each: Held) -> None:
    name, local = each.name, each.local
    if each.shape != spec.shape:
        raise UsageError(f"{name} is {each.shape} in the model, {spec.shape} in the base checkpoint.")
    if local is None:  # this rank holds nothing of it
        return
    if isinstance(local, np.ndarray):
        if local.dtype != spec.type.bits:
            raise UsageError(f"{name} is {local.dtype}; give the bits of {spec.dtype} as {spec.type.bits}.")
        return
    found = str(local.dtype).removeprefix("torch.")
    if found != _TORCH_NAMES[spec.dtype] and (spec.dtype, found) not in _ROUNDED | _WIDENED:
        raise UsageError(
            f"{name} is torch.{found} in the model and {spec.dtype} in the base checkpoint, and no bits of one are "
            "those of the other: train in the base's dtype or in float32, or start the swarm from a base that is saved "
            f"in {found}."
        )


def _check_complete(layout: Layout, seen: set[str]) -> None:
    missing = [spec.name for spec in layout.tensors if spec.name not in seen]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UsageError(f"The model lacks {missing[0]}{more}, which the base checkpoint has: publish all of it.")


def _rows(there: Any, spec: TensorSpec, part: Part) -> Any:
    """The part of a tensor's elements in memory, as an array of the tensor's rank."""
    if not spec.shape:
        return there
    whole = there.view(spec.type.bits).reshape(spec.shape)
    return whole[(slice(None),) * part.dim + (slice(part.start, part.start + part.length),)]


def _torch_rows(there: Any, spec: TensorSpec, part: Part) -> Any:
    import torch

    whole = torch.from_numpy(there).view(getattr(torch, _TORCH_NAMES[spec.dtype])).view(spec.shape)
    return whole.narrow(part.dim, part.start, part.length) if spec.shape else whole
