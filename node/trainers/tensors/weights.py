"""Copies a trainer's tensors, as the bits of the checkpoint, into memory that is laid out like a replica.

The layout decides the names and dtypes; tied tensors are written once. Where the model's dtype is another, the pair
decides. Float32 masters of a bfloat16 or float16 tensor are rounded to nearest, ties to even, as torch does. Half
precision in the place of float32 is widened, which is exact. Every other pair is refused, because the bits would not be
what the trainer computes with. Tensors may be torch tensors on any device, DTensors (each rank copies its part), or
numpy arrays of bits.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import numpy as np

from codec.bits import Bits
from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from codec.parts import policy_base
from node.trainers.ranks.copies import SLOTS, Copies
from node.trainers.ranks.ownership import Ownership, TensorPart
from node.trainers.tensors.drafted import Drafted, DraftNaming
from node.trainers.tensors.naming import HeldTensor, Naming, all_at_hand

__all__ = ["Copier", "check_names", "untied"]

_TORCH_NAMES: Final = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I8": "int8", "U8": "uint8",
    "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip
"""Checkpoint dtype -> torch's name of it."""
_ROUNDED: Final = {("BF16", "float32"), ("F16", "float32")}
"""(checkpoint dtype, trainer dtype): masters. Their rounded values are those that FSDP's forward and `.to()` use."""
_WIDENED: Final = {("F32", "bfloat16"), ("F32", "float16")}
"""(checkpoint dtype, trainer dtype): float32 tensors loaded in half precision, whose values float32 can represent."""


def check_names(layout: Layout, model: Any, *, leads: bool = True) -> dict[str, TensorPart | None]:
    """Compare a model with the base's layout. Returns the part of each tensor that this process holds (None: all of
    it), by checkpoint name.

    `layout`: of the base, with its draft model if there is one. `leads`: this process is rank 0, which writes all of
    the draft. Adapters are merged as they are in a publish. Raises `UsageError` naming the first tensor that is
    missing, unknown, untied, or of another shape or dtype, or the adapter that cannot be merged.
    """
    base = policy_base(layout)
    naming = Naming(base)
    held: dict[str, TensorPart | None] = dict.fromkeys(naming.unused(model))
    seen = set(held)
    tied: dict[str, Any] = {}
    for tensor in naming.held(model):
        spec = _spec(base, tensor.name)
        _check(spec, tensor)
        held[tensor.name] = tensor.part
        seen.add(spec.name)
        if spec.aliases and not _same_bits(spec, tied.setdefault(spec.name, tensor.local), tensor.local):
            raise untied(spec, tensor.name)
    _check_complete(base, seen)
    return held | dict.fromkeys(DraftNaming(layout).names if leads else ())


SMALL_BYTES: Final = 1 << 16
"""Tensors up to this size are copied in batches: for them a call takes longer than the copy."""
BATCH_TENSORS: Final = 256
"""Tensors copied by one call at most; bounds how many an iteration keeps alive."""


class Copier:
    """Writes one rank's part of each version into the shared copies."""

    def __init__(
        self,
        layout: Layout,
        copies: Copies,
        ownership: Ownership,
        rank: int,
        current_bits: Callable[[str], Bits] | None = None,
    ) -> None:
        """`current_bits(name)`: the bits that the swarm has of a tensor, for tensors that the model does not use."""
        self._layout, self._copies, self._ownership, self._rank = layout, copies, ownership, rank
        self._base = policy_base(layout)
        self._naming, self._current_bits = Naming(self._base), current_bits
        self._draft = DraftNaming(layout)
        self._views: dict[tuple[int, str], tuple[TensorPart, Any]] = {}

    def touch_pages(self) -> None:
        """Write zeros to this rank's part of both copies: the first touch of a page costs more than the copy, and is
        paid here, not in a step."""
        for slot in range(SLOTS):
            for spec in self._layout.tensors:
                part = self._ownership.writes(self._rank, spec.name)
                if part is not None:
                    _rows(self._copies.tensor(slot, spec), spec, part)[...] = 0

    def fill(self, slot: int, publish: int, source: Any, on_written: Callable[[], None] = lambda: None) -> None:
        """Copy this rank's part of every tensor of `source` (see `named_tensors`) into a copy. Afterwards the source
        may change. Of a `Drafted` source, both models; of others, nothing is written to the draft's part of the copy.

        `slot`, `publish`: which copy, and the number of the publish. `on_written()`: called when the first tensor, or
        all, can be read. Tensors from a device are reported as they are written, so that encoding overlaps the copying;
        a copy from host memory takes less time than that would save. Raises `UsageError` naming the tensor when one is
        missing, unknown, or of another shape, dtype or sharding.
        """
        with _no_grad():  # otherwise taking a DTensor's local part is recorded by autograd
            self._fill(slot, publish, source, on_written)
        self._copies.note_written(slot, self._rank, publish, self._ownership.tensors_of(self._rank))
        self._copies.note_copied(slot, self._rank, publish)
        on_written()

    def _fill(self, slot: int, publish: int, source: Any, on_written: Callable[[], None]) -> None:
        model = source.model if isinstance(source, Drafted) else source
        self._fill_from(slot, publish, self._base, self._naming, model, on_written)
        if isinstance(source, Drafted) and self._rank == 0:
            self._fill_from(slot, publish, self._layout, self._draft, source.draft, on_written)

    def _fill_from(
        self,
        slot: int,
        publish: int,
        layout: Layout,
        naming: Naming | DraftNaming,
        source: Any,
        on_written: Callable[[], None],
    ) -> None:
        """Copy the tensors of one model. `layout`: where their names are found."""
        seen: set[str] = set()
        small = _Batch()
        batches = all_at_hand(source)
        for tensor in naming.held(source):
            spec = _spec(layout, tensor.name)
            _check(spec, tensor)
            own = self._ownership.writes(self._rank, spec.name)
            if spec.name in seen:
                if own is not None:
                    small.copy()
                    self._check_tie(slot, spec, tensor, own)
                continue
            seen.add(spec.name)
            if own is None:
                continue
            if tensor.part is not None and tensor.part != own:
                raise UsageError(f"{tensor.name} is sharded otherwise than when the trainer attached: attach again.")
            if batches and small.accepts(spec, tensor.local):
                small.add_copy(self._rows(slot, spec, own), tensor.local)
                continue
            self._write(slot, spec, tensor, own)
            if getattr(tensor.local, "is_cuda", False):
                self._copies.note_written(slot, self._rank, publish, self._ownership.index(tensor.name))
                on_written()
        small.copy()
        seen |= self._keep_unused(slot, naming.unused(source))
        if isinstance(naming, Naming):
            _check_complete(layout, seen)
        elif missing := sorted(naming.names - seen):
            raise UsageError(
                f"The draft model lacks {missing[0].partition('/')[2]}, which the swarm's draft has: publish all of it."
            )

    def _keep_unused(self, slot: int, names: frozenset[str]) -> frozenset[str]:
        """Write the swarm's own bits of tensors that the model does not use, so that they stay unchanged."""
        for name in names:
            spec = self._layout.tensor(name)
            part = self._ownership.writes(self._rank, name)
            if part is not None and self._current_bits is not None:
                whole = self._current_bits(name).reshape(spec.shape)
                here = (slice(None),) * part.dim + (slice(part.start, part.start + part.length),)
                _rows(self._copies.tensor(slot, spec), spec, part)[...] = whole[here] if spec.shape else whole
        return names

    def _write(self, slot: int, spec: TensorSpec, tensor: HeldTensor, part: TensorPart) -> None:
        local = tensor.local
        if isinstance(local, np.ndarray):
            self._copies.tensor(slot, spec).view(spec.type.bits)[:] = local.reshape(-1)
            return
        rows = self._rows(slot, spec, part)
        rows.copy_(local.detach())
        if spec.dtype == "F16" and local.dtype.itemsize > 2 and bool((rows.isinf() & local.isfinite().cpu()).any()):
            raise UsageError(f"{tensor.name} has values beyond float16's 65,504: start the swarm from a bfloat16 base.")

    def _rows(self, slot: int, spec: TensorSpec, part: TensorPart) -> Any:
        """The memory of a part as a torch tensor. Cached, because making it takes four views at each publish."""
        key = slot, spec.name
        known = self._views.get(key)
        if known is None or known[0] != part:
            known = self._views[key] = part, _torch_rows(self._copies.tensor(slot, spec), spec, part)
        return known[1]

    def _check_tie(self, slot: int, spec: TensorSpec, tensor: HeldTensor, part: TensorPart) -> None:
        """Compare a second name of a tied tensor with the bits written under the first. Raises `UsageError`."""
        there, local = self._copies.tensor(slot, spec), tensor.local
        if isinstance(local, np.ndarray):
            same = np.array_equal(there.view(spec.type.bits), local.reshape(-1))
        else:
            same = _same_bits(spec, self._rows(slot, spec, part), local)
        if not same:
            raise untied(spec, tensor.name)


class _Batch:
    """Small tensors in host memory, copied many at a call."""

    def __init__(self) -> None:
        self._into: list[Any] = []
        self._from: list[Any] = []

    def accepts(self, spec: TensorSpec, local: Any) -> bool:
        """Whether a tensor may be batched: it is small, in host memory, and needs no check for overflow afterwards."""
        return (
            not isinstance(local, np.ndarray)
            and local.device.type == "cpu"
            and local.nbytes <= SMALL_BYTES
            and (spec.dtype != "F16" or local.dtype.itemsize <= 2)
        )

    def add_copy(self, into: Any, local: Any) -> None:
        """Queue the copy of `local` into `into`; runs the batch when it is full."""
        self._into.append(into)
        self._from.append(local)
        if len(self._into) >= BATCH_TENSORS:
            self.copy()

    def copy(self) -> None:
        """Run the copies that are queued."""
        if self._into:
            import torch

            torch._foreach_copy_(self._into, self._from)  # pyright: ignore[reportPrivateImportUsage]
            self._into, self._from = [], []


def _no_grad() -> AbstractContextManager[Any]:
    torch = sys.modules.get("torch")  # a trainer that gives numpy arrays need not have torch
    return nullcontext() if torch is None else torch.no_grad()


def _same_bits(spec: TensorSpec, one: Any, other: Any) -> bool:
    """Whether two tensors have the same bits in the checkpoint's dtype. None: this rank holds nothing of the tensor."""
    if one is other or one is None or other is None:
        return one is other
    if isinstance(one, np.ndarray):
        return np.array_equal(one.reshape(-1), other.reshape(-1))
    import torch

    if one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and one.shape == other.shape:
        return True
    kind = getattr(torch, _TORCH_NAMES[spec.dtype])
    return torch.equal(*(_as_bytes(tensor.detach().to("cpu", kind)) for tensor in (one, other)))


def untied(spec: TensorSpec, name: str) -> UsageError:
    """The error for a tensor `name` that is one with `spec` in the base and differs from it in the model."""
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


def _check(spec: TensorSpec, tensor: HeldTensor) -> None:
    name, local = tensor.name, tensor.local
    if tensor.shape != spec.shape:
        raise UsageError(f"{name} is {tensor.shape} in the model, {spec.shape} in the base checkpoint.")
    if local is None:  # this rank holds nothing of the tensor
        return
    if isinstance(local, np.ndarray):
        if local.dtype != spec.type.bits:
            raise UsageError(f"{name} is {local.dtype}; give the bits of {spec.dtype} as {spec.type.bits}.")
        return
    found = str(local.dtype).removeprefix("torch.")
    if found != _TORCH_NAMES[spec.dtype] and (spec.dtype, found) not in _ROUNDED | _WIDENED:
        raise UsageError(
            f"{name} is torch.{found} in the model and {spec.dtype} in the base checkpoint, which are not "
            "converted to each other: train in the base's dtype or in float32, or start the swarm from a base that is "
            f"saved in {found}."
        )


def _check_complete(layout: Layout, seen: set[str]) -> None:
    missing = [spec.name for spec in layout.tensors if spec.name not in seen]
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UsageError(f"The model lacks {missing[0]}{more}, which the base checkpoint has: publish all of it.")


def _rows(there: Any, spec: TensorSpec, part: TensorPart) -> Any:
    """The elements of a part in memory, as an array with the tensor's number of dimensions."""
    if not spec.shape:
        return there
    whole = there.view(spec.type.bits).reshape(spec.shape)
    return whole[(slice(None),) * part.dim + (slice(part.start, part.start + part.length),)]


def _torch_rows(there: Any, spec: TensorSpec, part: TensorPart) -> Any:
    import torch

    whole = torch.from_numpy(there).view(getattr(torch, _TORCH_NAMES[spec.dtype])).view(spec.shape)
    return whole.narrow(part.dim, part.start, part.length) if spec.shape else whole
