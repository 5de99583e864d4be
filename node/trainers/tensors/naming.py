"""A model's tensors under the checkpoint's names, as this process holds them.

Usually a tensor of the checkpoint is one of the model's, under the same name. A transformers model may hold several of
them fused in one parameter, or one of them transposed or in parts (`node.models.conversion` knows which). Then the
checkpoint's tensor is a view of the parameter, or is assembled in new memory, one tensor at a time. Of a parameter that
FSDP2 shards, each process sees its own rows.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.trainers.ranks.ownership import TensorPart
from node.trainers.tensors.adapters import PEFT_PREFIX, has_adapters, merged
from node.trainers.tensors.sharding import is_sharded, part_of

__all__ = ["HeldTensor", "Naming", "all_at_hand", "named_tensors", "plain_name"]

_WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of parameter names that DistributedDataParallel, torch.compile and activation checkpointing insert."""
_ITERATOR: Final = "publish an iterator of (checkpoint name, tensor)"

_CONVERSIONS: Final[dict[Any, Any]] = {}
"""Cache by model class, config and layout. Some 18,000 experts take seconds, spent in `attach` and not in `publish`."""
_KEPT: Final = 2
"""Conversions in the cache. A process trains one model, rarely two."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor under its checkpoint name, as this process holds it.

    `shape`: of the whole tensor. `part`: which part of it `local` is; None: all. `local`: a torch tensor, a numpy array
    of bits, or None where this rank holds nothing of it.
    """

    name: str
    shape: tuple[int, ...]
    part: TensorPart | None
    local: Any


def named_tensors(source: Any) -> Iterable[tuple[str, Any]]:
    """(name, tensor) of a `torch.nn.Module`, a mapping, or an iterable of pairs, with wrappers' prefixes removed.

    For a module with adapters: the merged tensors, one layer at a time.
    """
    if hasattr(source, "state_dict"):
        source = merged(source) if has_adapters(source) else _state(source)
    pairs = source.items() if isinstance(source, Mapping) else source
    for name, tensor in pairs:
        yield plain_name(name), tensor


def all_at_hand(source: Any) -> bool:
    """Whether all tensors of `source` exist at once. An iterator may reuse the memory of one tensor for the next."""
    return isinstance(source, Mapping) or (hasattr(source, "state_dict") and not has_adapters(source))


class Naming:
    """Brings the tensors of a model under the names of one layout."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._order = {name: i for i, spec in enumerate(layout.tensors) for name in (spec.name, *spec.aliases)}

    def held(self, source: Any) -> Iterator[HeldTensor]:
        """Every tensor of `source` (see `named_tensors`); in the layout's order if all of them exist at once.

        Raises `UsageError` naming a tensor for which there is no name in the checkpoint.
        """
        conversion = self._conversion(source)
        if conversion is not None:
            yield from _Converted(self._layout, conversion, source).held(self._pairs(source, conversion))
            return
        for name, tensor in self._pairs(source, None):
            yield _one_to_one(name, tensor)

    def unused(self, source: Any) -> frozenset[str]:
        """Names of the checkpoint's tensors that the model's class does not use. They stay as they are in the base."""
        conversion = self._conversion(source)
        return frozenset() if conversion is None else conversion.unused

    def checkpoint_name(self, source: Any) -> Callable[[str], str]:
        """Maps the name of a parameter of `source` to that of the checkpoint tensor which equals it.

        The function raises `UsageError` for a parameter that is no single tensor of the checkpoint. Names stay as they
        are where the library's loader cannot tell, as for a model that was quantized when it was loaded (QLoRA).
        """
        try:
            conversion = self._conversion(source)
        except UsageError:
            conversion = None
        if conversion is None:
            return lambda name: name
        plain = {conversion.plain(spec): spec.name for spec in self._layout.tensors}

        def checkpoint_name(name: str) -> str:
            if name not in plain:
                raise UsageError(
                    f"{name} is not one tensor of the base checkpoint (the model holds several fused, or one in "
                    "parts), so its adapter fits no other engine: publish the model merged, with publish(model) and "
                    "without adapter=."
                )
            return plain[name]

        return checkpoint_name

    def _pairs(self, source: Any, conversion: Any) -> Iterable[tuple[str, Any]]:
        pairs = named_tensors(source)
        if all_at_hand(source):
            first = dict(self._order)
            places = {} if conversion is None else conversion.places
            for spec in reversed(self._layout.tensors):
                for place in places.get(spec.name, ()):
                    first[place.param] = self._order[spec.name]
            pairs = sorted(pairs, key=lambda pair: first.get(pair[0], -1))
        return pairs

    def _conversion(self, source: Any) -> Any:
        """How a transformers model holds the layout's tensors; None for other sources, which use the layout's names."""
        model = _library_model(source)
        if model is None:
            return None
        from node.models.conversion import conversion_of, plain_class

        key = plain_class(model), model.config.to_json_string(use_diff=False), self._layout.hash
        if key not in _CONVERSIONS:
            conversion = conversion_of(model, self._layout)
            while len(_CONVERSIONS) >= _KEPT:
                _CONVERSIONS.pop(next(iter(_CONVERSIONS)))
            _CONVERSIONS[key] = conversion
        return _CONVERSIONS[key]


class _Converted:
    """One pass over a transformers model's tensors."""

    def __init__(self, layout: Layout, conversion: Any, source: Any) -> None:
        self._layout, self._conversion = layout, conversion
        self._raw = {plain_name(name): tensor for name, tensor in _raw_state(source)}
        self._twins: dict[Any, str] = {}
        """Address and shape of each parameter that holds some of the checkpoint -> its name."""
        self._fed: dict[str, list[str]] = {}
        """Name of a parameter -> names of the checkpoint's tensors that it holds some of."""
        for name, places in conversion.places.items():
            for param in {place.param for place in places}:
                self._fed.setdefault(param, []).append(name)

    def held(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[HeldTensor]:
        """Each tensor by its checkpoint name, as soon as all parameters that hold it have come. Tied ones come last."""
        waiting: dict[str, dict[str, Any]] = {}
        others: list[tuple[str, Any]] = []
        for name, tensor in pairs:
            if name not in self._conversion.shapes:
                others.append((name, tensor))
                continue
            self._check(name, tensor)
            self._twins[_where(tensor)] = name
            for target in self._fed.get(name, ()):
                spec = self._layout.tensor(target)
                if self._conversion.plain(spec) == name:
                    yield _one_to_one(target, tensor)
                    continue
                params = waiting.setdefault(target, {})
                params[name] = tensor
                places = self._conversion.places[target]
                if len(params) == len({place.param for place in places}):
                    yield _assemble(spec, places, waiting.pop(target))
        for name, tensor in others:
            if not self._is_tied(name, tensor):
                yield _one_to_one(name, tensor)

    def _check(self, name: str, tensor: Any) -> None:
        wanted = self._conversion.shapes[name]
        if tuple(tensor.shape) != wanted:
            raise UsageError(
                f"{name} is {tuple(tensor.shape)} in the model, {wanted} by its config: the checkpoint is of another "
                "model."
            )

    def _is_tied(self, name: str, tensor: Any) -> bool:
        """Whether a tensor shares its memory with one that came under another name and that the checkpoint has.

        Raises `UsageError` when an adapter changes only one of two tied tensors.
        """
        try:
            self._layout.tensor(name)
            return False  # the checkpoint knows the name, so the bits are compared
        except KeyError:
            pass
        raw = self._raw.get(name)
        if raw is None or _where(raw) != _where(tensor):  # merging an adapter made a new tensor
            return False
        if _where(raw) in self._twins:
            return True
        twins = [other for other, held in self._raw.items() if other != name and _where(held) == _where(raw)]
        if twins:
            raise UsageError(
                f"{name} is tied to {twins[0]}, which an adapter changes on its own: the checkpoint cannot hold both. "
                "Start the swarm from a checkpoint in which they are stored apart (tie_word_embeddings false)."
            )
        return False


def _assemble(spec: TensorSpec, places: Iterable[Any], params: Mapping[str, Any]) -> HeldTensor:
    """What this process holds of a tensor that lies in boxes of one or several parameters.

    Raises `UsageError` when this rank's rows of the parameters are not one part of the tensor.
    """
    boxes: list[tuple[Any, Any]] = []
    complete, parts = True, []
    for place in places:
        held = _one_to_one(place.param, params[place.param])
        piece, local = place.piece, held.local
        if held.part is not None:
            dim, start = held.part.dim, held.part.start
            piece = piece.cut(dim, start, start + held.part.length)
            complete &= piece == place.piece
            if piece is None:
                continue
            parts.append((dim, piece))
            at = piece.shift(dim, -start)
        else:
            at = piece
        boxes.append((piece, _box(local, at)))
    if complete:
        return HeldTensor(spec.name, spec.shape, None, _assembled(spec, boxes))
    if not boxes:
        return HeldTensor(spec.name, spec.shape, TensorPart(0, 0, 0), None)
    if len(boxes) == 1 and len(parts) == 1:
        dim, piece = parts[0]
        part = _part(spec, dim, piece)
        if part is not None:
            shape = (*spec.shape[: part.dim], part.length, *spec.shape[part.dim + 1 :])
            return HeldTensor(spec.name, spec.shape, part, _in_order(boxes[0][1], piece).reshape(shape))
    raise UsageError(
        f"{spec.name} is cut among the ranks into more than one piece each, since the model holds it in another shape: "
        f"{_ITERATOR} from one rank."
    )


def _box(tensor: Any, piece: Any) -> Any:
    ends = zip(piece.start, piece.shape, strict=True)
    return tensor.detach()[tuple(slice(start, start + size) for start, size in ends)]


def _in_order(box: Any, piece: Any) -> Any:
    """A box with its dimensions in the order in which the checkpoint's tensor has them."""
    return box.permute(sorted(range(len(piece.shape)), key=lambda dim: -piece.strides[dim]))


def _assembled(spec: TensorSpec, boxes: list[tuple[Any, Any]]) -> Any:
    if len(boxes) == 1:
        return _in_order(boxes[0][1], boxes[0][0]).reshape(spec.shape)
    import torch

    kind = boxes[0][1].dtype
    for _, box in boxes:
        kind = torch.promote_types(kind, box.dtype)
    whole = torch.empty(spec.shape, dtype=kind, device=boxes[0][1].device)
    for piece, box in boxes:
        whole.as_strided(piece.shape, piece.strides, piece.offset).copy_(box)
    return whole


def _part(spec: TensorSpec, dim: int, piece: Any) -> TensorPart | None:
    """The part of the checkpoint's tensor that a cut box is; None: it is not whole rows along one dimension."""
    step = piece.strides[dim]
    for at in range(len(spec.shape)):
        inner = prod(spec.shape[at + 1 :])
        outer = prod(spec.shape[:at])
        if inner == step and piece.elements == outer * piece.shape[dim] * inner:
            return TensorPart(at, piece.offset // inner, piece.shape[dim])
    return None


def _one_to_one(name: str, tensor: Any) -> HeldTensor:
    shape = tuple(tensor.shape)
    if not is_sharded(tensor):
        return HeldTensor(name, shape, None, tensor.to_local() if hasattr(tensor, "to_local") else tensor)
    part, local = part_of(name, tensor)
    return HeldTensor(name, shape, part, local)


@lru_cache(1 << 16)
def plain_name(name: str) -> str:
    """The name of a parameter or module without the prefixes of wrappers and of peft."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    return ".".join(parts).removeprefix(PEFT_PREFIX)


def _where(tensor: Any) -> tuple[int, tuple[int, ...]]:
    """Address and shape of a tensor; equal for two names of one tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.data_ptr(), tuple(tensor.shape)


def _raw_state(source: Any) -> Iterable[tuple[str, Any]]:
    return _state(source).items()


def _state(source: Any) -> Mapping[str, Any]:
    """A module's state by name, not detached: detaching a small DTensor takes longer than everything else done with it.
    A class that overrides `state_dict` may not accept `keep_vars`."""
    torch = sys.modules.get("torch")
    if torch is not None and getattr(type(source), "state_dict", None) is torch.nn.Module.state_dict:
        return source.state_dict(keep_vars=True)
    return source.state_dict()


def _library_model(source: Any) -> Any:
    """The transformers model that `source` is, or that it wraps under prefixes that `_plain` removes; else None."""
    if "transformers" not in sys.modules or not hasattr(source, "named_modules"):
        return None
    from transformers import PreTrainedModel

    for name, module in source.named_modules():
        if isinstance(module, PreTrainedModel):
            return module if not plain_name(f"{name}." if name else "").strip(".") else None
    return None
