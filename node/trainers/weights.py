"""A trainer's tensors -> the bits of the checkpoint, in memory laid out like a replica.

The layout decides: its names, its dtypes, tied tensors once. A float32 master of a bfloat16 tensor is rounded (to
nearest, ties to even, as torch does); every other difference of dtype is refused, because it would not be what the
trainer computes with. Tensors may be torch's, on any device, sharded (DTensor: each rank copies what it holds), or
numpy arrays of bits.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.trainers.copies import Copies
from node.trainers.lora import has_lora, merged
from node.trainers.shares import Part, Shares

__all__ = ["Copier", "check_names", "is_sharded", "local_part", "named_tensors"]

_WRAPPERS: Final = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What DistributedDataParallel, torch.compile, activation checkpointing and the like put into parameter names."""
_TORCH_NAMES: Final = {
    "BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64", "I8": "int8", "U8": "uint8",
    "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64", "BOOL": "bool",
}  # fmt: skip


def named_tensors(source: Any, *, names_only: bool = False) -> Iterable[tuple[str, Any]]:
    """(name, tensor) of a `torch.nn.Module`, a mapping, or an iterable of pairs, wrappers' prefixes removed.

    Of a module with LoRA layers: as if the adapters were merged, one tensor at a time (`names_only`: as they are).
    """
    if hasattr(source, "state_dict"):
        source = merged(source, names_only=names_only) if has_lora(source) else source.state_dict()
    pairs = source.items() if isinstance(source, Mapping) else source
    for name, tensor in pairs:
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, tensor


def is_sharded(tensor: Any) -> bool:
    """Whether this is a DTensor that more than one process holds. Imports nothing."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements") and tensor.device_mesh.size() > 1


def local_part(name: str, tensor: Any) -> tuple[Part | None, Any]:
    """What this process holds of a tensor: which part (None: all of it), and its elements. Raises `UsageError`."""
    if not is_sharded(tensor):
        return None, tensor.to_local() if hasattr(tensor, "to_local") else tensor
    from node.trainers.fsdp2 import part_of

    return part_of(name, tensor)


def check_names(layout: Layout, model: Any) -> dict[str, Part | None]:
    """What this process holds of the model, by checkpoint name. Looks at names, shapes and dtypes only: it is cheap.

    Raises `UsageError` naming the first tensor that is missing, unknown, or of another shape or dtype.
    """
    held: dict[str, Part | None] = {}
    seen: set[str] = set()
    for name, tensor in named_tensors(model, names_only=True):
        spec = _spec(layout, name)
        _check(spec, name, tensor)
        held[name] = local_part(name, tensor)[0]
        seen.add(spec.name)
    _check_complete(layout, seen)
    return held


class Copier:
    """Writes one rank's part of each version into the shared copies."""

    def __init__(self, layout: Layout, copies: Copies, shares: Shares, rank: int) -> None:
        self._layout, self._copies, self._shares, self._rank = layout, copies, shares, rank
        for slot in range(2):  # the first touch of a page costs more than the copy: here, not in the first steps
            for spec in layout.tensors:
                part = shares.writes(rank, spec.name)
                if part is not None:
                    _rows(copies.tensor(slot, spec), spec, part)[...] = 0

    def fill(self, slot: int, publish: int, source: Any) -> None:
        """Copy what is ours of every tensor of `source` (see `named_tensors`). Afterwards the source may change.

        Says which tensors are written as they are, where they come from a device: encoding goes on beside the copying
        then. From this host's memory the copy takes less time than that would save it. Raises `UsageError` naming the
        tensor when one is missing, unknown, or of another shape, dtype or sharding.
        """
        seen: set[str] = set()
        for name, tensor in self._in_order(source):
            spec = _spec(self._layout, name)
            _check(spec, name, tensor)
            part, local = local_part(name, tensor)
            ours = self._shares.writes(self._rank, spec.name)
            if spec.name in seen:
                if ours is not None:
                    self._check_tie(slot, spec, name, local, ours)
                continue
            seen.add(spec.name)
            if ours is None:
                continue
            if part is not None and part != ours:
                raise UsageError(f"{name} is sharded otherwise than when the trainer attached: attach again.")
            self._write(slot, spec, local, ours)
            if getattr(local, "is_cuda", False):
                self._copies.tell(slot, self._rank, publish, self._shares.index(name))
        _check_complete(self._layout, seen)
        self._copies.tell(slot, self._rank, publish, self._shares.tensors_of(self._rank))
        self._copies.finish(slot, self._rank, publish)

    def _in_order(self, source: Any) -> Iterable[tuple[str, Any]]:
        """As the layout has them, where all are at hand: the order in which they are encoded."""
        pairs = named_tensors(source)
        if isinstance(source, Mapping) or (hasattr(source, "state_dict") and not has_lora(source)):
            found = list(pairs)
            order = {name: i for i, spec in enumerate(self._layout.tensors) for name in (spec.name, *spec.aliases)}
            pairs = sorted(found, key=lambda pair: order.get(pair[0], -1))
        return pairs

    def _write(self, slot: int, spec: TensorSpec, local: Any, part: Part) -> None:
        there = self._copies.tensor(slot, spec)
        if isinstance(local, np.ndarray):
            there.view(spec.type.bits)[:] = local.reshape(-1)
        else:
            _torch_rows(there, spec, part).copy_(local.detach())

    def _check_tie(self, slot: int, spec: TensorSpec, name: str, local: Any, part: Part) -> None:
        """A second name of a tied tensor must hold the same bits, or the tie was broken in training."""
        there = self._copies.tensor(slot, spec)
        if isinstance(local, np.ndarray):
            same = np.array_equal(there.view(spec.type.bits), local.reshape(-1))
        else:
            import torch

            mine = _torch_rows(there, spec, part)
            theirs = local.detach().to("cpu", mine.dtype)
            same = torch.equal(_as_bytes(mine), _as_bytes(theirs))
        if not same:
            raise UsageError(
                f"{name} and {spec.name} are tied in the base checkpoint and differ in the model: "
                "start the swarm from a checkpoint in which they are stored apart."
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
            "started from, or publish an iterator of (checkpoint name, tensor)."
        ) from error


def _check(spec: TensorSpec, name: str, tensor: Any) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise UsageError(f"{name} is {tuple(tensor.shape)} in the model, {spec.shape} in the base checkpoint.")
    if isinstance(tensor, np.ndarray):
        if tensor.dtype != spec.type.bits:
            raise UsageError(f"{name} is {tensor.dtype}; give the bits of {spec.dtype} as {spec.type.bits}.")
        return
    wanted, found = _TORCH_NAMES[spec.dtype], str(tensor.dtype).removeprefix("torch.")
    if found != wanted and (wanted, found) != ("bfloat16", "float32"):
        raise UsageError(
            f"{name} is torch.{found} in the model and {spec.dtype} in the base checkpoint; "
            "only float32 masters of a bfloat16 checkpoint are rounded."
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
