"""Where each tensor of a checkpoint is in a transformers model, found by running the library's own loader.

transformers renames, fuses, splits and transposes a checkpoint's tensors when it loads them, by tables for each
architecture. This module runs its loader once on a model without memory and tensors without elements
(`node.models.symbols`). Each parameter then shows which elements `from_pretrained` would have put where. So nothing is
assumed about any architecture. A loader that only moves elements is followed element by element; one that computes is
refused.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from codec.errors import UsageError
from codec.layout import Layout, TensorSpec
from node.models.dtypes import TORCH_DTYPES
from node.models.pieces import Piece, strides_of
from node.models.symbols import Symbol

__all__ = ["Conversion", "ParameterBox", "conversion_of", "plain_class"]

_SAVE_ANEW: Final = (
    "Load the folder, save it with save_pretrained(..., save_original_format=False), and start the swarm from that"
)


@dataclass(frozen=True, slots=True)
class ParameterBox:
    """A box of the parameter `param`, and the checkpoint elements in it (`Piece.source` is the checkpoint tensor)."""

    param: str
    piece: Piece


@dataclass(frozen=True)
class Conversion:
    """The places of the checkpoint's tensors in the model's parameters.

    `places`: by checkpoint tensor. `shapes`, `dtypes`: by parameter or saved buffer, as `from_pretrained` makes them;
    parameters without checkpoint elements (usually tied ones) are missing. `unused`: the checkpoint's tensors that the
    model's class declares unused.
    """

    places: dict[str, tuple[ParameterBox, ...]]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    unused: frozenset[str]

    def plain(self, spec: TensorSpec) -> str | None:
        """The parameter that equals this tensor element by element, or None."""
        places = self.places.get(spec.name, ())
        if not spec.elements or len(places) != 1 or self.shapes[places[0].param] != spec.shape:
            return None
        (place,) = places
        return place.param if place.piece == replace(_all_of(spec), source=spec.name) else None


def plain_class(model: Any) -> type:
    """The model's class without FSDP2: `fully_shard` replaces a model's class by a subclass of its own."""
    for kind in type(model).__mro__:
        if not any(base.__name__ == "FSDPModule" for base in kind.__mro__):
            return kind
    raise AssertionError("object is not an FSDPModule")


def conversion_of(model: Any, layout: Layout, dtype: torch.dtype = torch.float32) -> Conversion:
    """Where `layout`'s tensors are in `model`, a `PreTrainedModel` that is loaded as `dtype`.

    Raises `UsageError`, which names the tensor, when the checkpoint is not this model's, or when loading does more than
    move elements.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise UsageError(
            "The base is quantized (quantization_config in its config.json): the trainer's weights are no bits of it. "
            "Start the swarm from a folder that is saved without quantization."
        )
    try:
        ghost, info = _load_symbols(model, layout, dtype)
    except (ImportError, AttributeError, TypeError, ValueError, LookupError, RuntimeError) as error:
        return _by_name(model, layout, error)
    _check_loaded(ghost, info)
    state = {name: tensor for name, tensor in ghost.state_dict().items() if isinstance(tensor, Symbol)}
    found: dict[str, list[ParameterBox]] = {}
    for name, symbol in state.items():
        for piece in symbol.pieces:
            found.setdefault(piece.source, []).append(ParameterBox(name, piece))
    unused = _unused(ghost, [spec for spec in layout.tensors if spec.elements and spec.name not in found])
    for spec in layout.tensors:
        if spec.name in found and not _once(spec, [place.piece for place in found[spec.name]]):
            raise UsageError(
                f"{found[spec.name][0].param} holds some elements of the checkpoint's {spec.name} twice, or not all of "
                f"them. {_SAVE_ANEW}."
            )
    shapes = {name: tuple(symbol.shape) for name, symbol in state.items()}
    dtypes = {name: symbol.dtype for name, symbol in state.items()}
    return Conversion({name: tuple(places) for name, places in found.items()}, shapes, dtypes, unused)


def _load_symbols(model: Any, layout: Layout, dtype: torch.dtype) -> tuple[Any, Any]:
    """(a model of the same class without memory, with its tensors as the loader made them; the loader's report)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    symbols = {spec.name: Symbol.stored(spec.name, spec.shape, TORCH_DTYPES[spec.dtype]) for spec in layout.tensors}
    with torch.device("meta"):
        ghost = plain_class(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    mapping: Any = get_model_conversion_mapping(ghost)
    config = LoadStateDictConfig(dtype=dtype, dtype_plan=ghost._get_dtype_plan(dtype), weight_mapping=mapping)
    with _no_progress_bar():
        info, _ = convert_and_load_state_dict_in_model(ghost, symbols, config)
    return ghost, info


def _by_name(model: Any, layout: Layout, why: Exception) -> Conversion:
    """The conversion by names, for a release of transformers whose loader cannot be followed (`why`).

    Raises `UsageError` unless the names and shapes are the same and the model has no converters.
    """
    from transformers import __version__

    state = {name: tensor for name, tensor in model.state_dict().items() if name in {s.name for s in layout.tensors}}
    alike = all(spec.name in state and tuple(state[spec.name].shape) == spec.shape for spec in layout.tensors)
    if not alike or _has_converters(model):
        raise UsageError(
            f"How transformers {__version__} loads a {plain_class(model).__name__} by this model's config cannot be "
            f"followed ({why}): was the model changed since it was loaded? Publish an iterator of (checkpoint name, "
            "tensor)."
        ) from why
    places = {spec.name: (ParameterBox(spec.name, _all_of(spec)),) for spec in layout.tensors if spec.elements}
    dtypes = {name: tensor.dtype for name, tensor in state.items()}
    return Conversion(places, {name: tuple(tensor.shape) for name, tensor in state.items()}, dtypes, frozenset())


def _has_converters(model: Any) -> bool:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:  # a release without converters
        return False
    return any(isinstance(rule, WeightConverter) for rule in get_model_conversion_mapping(model))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the loader's progress bar, because nothing is loaded here."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_loaded(ghost: Any, info: Any) -> None:
    """Raises `UsageError` when the loader computed something or found another shape."""
    for name, why in sorted(info.conversion_errors.items()):
        line = str(why).strip().splitlines()[-2 if "\n" in str(why).strip() else -1]
        raise UsageError(f"{name} is not merely moved elements of the checkpoint's tensors ({line}). {_SAVE_ANEW}.")
    for name, there, here in sorted(info.mismatched_keys, key=str):
        raise UsageError(f"{name} is {tuple(there)} in the checkpoint, {tuple(here)} in the model.")


def _unused(ghost: Any, specs: Iterable[TensorSpec]) -> frozenset[str]:
    """The names of `specs`, tensors that the loader did not use. Raises `UsageError` unless the class ignores them."""
    patterns = set(getattr(ghost, "_keys_to_ignore_on_load_unexpected", None) or ())
    names = [name for name, _ in ghost.named_buffers()]
    patterns |= {r"rotary_emb\.inv_freq"} if any(name.endswith("rotary_emb.inv_freq") for name in names) else set()
    patterns |= {r"(^|\.)position_ids$"} if any(name.endswith("position_ids") for name in names) else set()
    unused = {spec.name for spec in specs}
    for name in sorted(unused):
        if not any(re.search(pattern, name) for pattern in patterns):
            raise UsageError(
                f"The checkpoint has a tensor {name} that the model lacks: is it another model's? If the model never "
                "had it, load the folder, save it anew with save_pretrained, and start the swarm from that."
            )
    return frozenset(unused)


def _all_of(spec: TensorSpec) -> Piece:
    return Piece(spec.name, (0,) * len(spec.shape), spec.shape, 0, strides_of(spec.shape))


def _once(spec: TensorSpec, pieces: list[Piece]) -> bool:
    """Whether each element of the tensor is in exactly one of the pieces."""
    if sum(piece.elements for piece in pieces) != spec.elements:
        return False
    if len(pieces) == 1:
        return True
    # If every piece consists of whole rows, rows are counted instead of elements, which takes less memory.
    row = spec.shape[-1] if spec.shape else 1
    rows = [_by_rows(piece, row) for piece in pieces]
    if any(piece is None for piece in rows):
        rows, row = list(pieces), 1
    seen = np.zeros(spec.elements // row, bool)
    for piece in rows:
        assert piece is not None
        box = np.lib.stride_tricks.as_strided(seen[piece.offset :], piece.shape, piece.strides)
        if box.any():
            return False
        box[...] = True
    return bool(seen.all())


def _by_rows(piece: Piece, row: int) -> Piece | None:
    """The same box in units of rows; None when it has parts of rows."""
    inner = [i for i, (size, step) in enumerate(zip(piece.shape, piece.strides, strict=True)) if step == 1 < size]
    if row == 1 or len(inner) != 1 or piece.shape[inner[0]] != row or piece.offset % row:
        return None
    kept = [i for i in range(len(piece.shape)) if i != inner[0] and piece.shape[i] > 1]
    if any(piece.strides[i] % row for i in kept):
        return None
    shape, strides = (tuple(numbers[i] for i in kept) for numbers in (piece.shape, piece.strides))
    return Piece(
        piece.source, (0,) * len(kept), shape, piece.offset // row, tuple(step // row for step in strides)
    )  # fmt: skip
