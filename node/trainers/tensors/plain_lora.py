"""An adapter as plain LoRA: the matrices A and B of each adapted module, in bfloat16, and how each product is scaled.

The adapter comes from a model with adapters, from a peft config with its tensors, or from a folder that peft saved
(`adapter_config.json` with `adapter_model.safetensors`; read without torch). What an engine for plain LoRA cannot apply
is refused by name. LoRA is from Hu et al. 2021, arXiv:2106.09685: a module with the weight W (out, in) computes
`(W + scaling * B A) x`, with A of shape (rank, in) and B of shape (out, rank).
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from codec.bits import DTYPES, Bits
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from node.trainers.tensors.adapters import PEFT_PREFIX
from node.trainers.tensors.lora import is_lora
from node.trainers.tensors.naming import plain_name
from node.trainers.tensors.rounding import bring, can_bring

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "MERGED",
    "LoraModule",
    "PlainLora",
    "plain_lora",
    "read_folder",
    "tensors_of",
]

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_MAX_CONFIG_BYTES: Final = 1 << 20
MERGED: Final = "publish the model merged, with publish(model) and without adapter="
"""The way out of every refusal: merged weights say whatever the adapter does."""
_ALTERS_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the adapter's first product from the base: the adapter fits no other base."""
_STRAY: Final = {
    "modules_to_save": "modules_to_save trains whole modules",
    "trainable_token_indices": "trainable_token_indices trains rows of the embedding",
    "target_parameters": "target_parameters adapts parameters that are no linear layer's weight",
    "layer_replication": "layer_replication adds layers to the model",
    "use_dora": "use_dora (DoRA) also trains a magnitude for each column",
    "lora_bias": "lora_bias trains biases",
    "use_qalora": "use_qalora pools the layer's input",
    "use_bdlora": "use_bdlora has matrices of blocks",
    "alora_invocation_tokens": "alora_invocation_tokens switches the adapter on in the middle of a sequence",
    "arrow_config": "arrow_config mixes adapters anew for each token",
    "fan_in_fan_out": "fan_in_fan_out adapts layers that store their weight transposed",
}
"""Field of a `LoraConfig` -> what it does that plain LoRA does not."""
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One adapted module. `name`: as in the base checkpoint, without ".weight". `a`: uint16 (rank, in), the bits of A
    in bfloat16; `b`: uint16 (out, rank). `alpha`: see `PlainLora.rslora`."""

    name: str
    a: Bits
    b: Bits
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class PlainLora:
    """An adapter. `modules`: in ascending order of their names, at least one. `peft`: the adapter's peft config as
    plain JSON values; empty for layers that are not peft's. `rslora`: a module's scaling is alpha / sqrt(rank), and not
    alpha / rank."""

    modules: tuple[LoraModule, ...]
    peft: Mapping[str, Any]
    rslora: bool = False


def plain_lora(source: Any, adapter: str, checkpoint_name: Callable[[Any], Callable[[str], str]]) -> PlainLora:
    """The adapter in `source`, copied: a module with adapters, a pair (peft config, tensors by peft's names: of torch,
    or numpy arrays in float32 or with the bits in bfloat16, uint16), or the path of a folder that peft saved.

    `adapter`: of a module that has several, the one of this name, else the active one. `checkpoint_name(module)`: how
    the names of that module's parameters become the base checkpoint's.

    Raises `UsageError` naming what plain LoRA does not have, or a tensor of another dtype.
    """
    if isinstance(source, str | Path):
        return read_folder(Path(source))
    if hasattr(source, "named_modules"):
        return _of_model(source, adapter, checkpoint_name)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[1], Mapping):
        config = _config_values(source[0])
        return _of_tensors(config, {name: _held(name, tensor) for name, tensor in source[1].items()}, "the adapter")
    raise UsageError(
        "publish(..., adapter=...) takes a model with adapters, a pair (peft config, tensors by name), or the path of "
        f"a folder that peft saved, and not {type(source).__name__}."
    )


def read_folder(folder: Path) -> PlainLora:
    """The adapter that peft saved in `folder`. Raises `UsageError` when it is none, or no plain LoRA."""
    try:
        raw = (folder / ADAPTER_CONFIG).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{folder} has no {ADAPTER_CONFIG} ({error.strerror}): give a folder that peft's save_pretrained wrote."
        ) from error
    if len(raw) > _MAX_CONFIG_BYTES:
        raise UsageError(f"{folder / ADAPTER_CONFIG} is {len(raw):,} bytes long, and no config of peft.")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{folder / ADAPTER_CONFIG} is not JSON ({error}).") from error
    if not isinstance(config, dict):
        raise UsageError(f"{folder / ADAPTER_CONFIG} is no JSON object.")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise UsageError(
            f"{folder} has no {ADAPTER_WEIGHTS}: save the adapter with save_pretrained(safe_serialization=True)."
        )
    stored = Checkpoint.open(folder / ADAPTER_WEIGHTS)
    return _of_tensors(config, {name: _Stored(stored, name) for name in stored.names}, str(folder))


# ------------------------------------------------------------ tensors of either kind


class _Torch:
    """A torch tensor. `bits()`: uint16, in bfloat16, copied."""

    def __init__(self, name: str, tensor: Any) -> None:
        self.name, self._tensor = name, tensor
        self.shape = tuple(tensor.shape)

    def bits(self) -> Bits:
        import torch

        tensor = self._tensor.detach()
        if hasattr(tensor, "placements"):
            raise UsageError(
                f"{self.name} is sharded: gather the adapter (peft's get_peft_model_state_dict, full_tensor()) and "
                "publish (peft config, tensors) from one rank."
            )
        if tensor.dtype not in (torch.bfloat16, torch.float32):
            raise _wrong_dtype(self.name, str(tensor.dtype).removeprefix("torch."))
        return tensor.to("cpu", torch.bfloat16, copy=True).contiguous().view(torch.int16).numpy().view(np.uint16)


class _Array:
    """A numpy array: float32, or uint16 with the bits in bfloat16."""

    def __init__(self, name: str, array: Any) -> None:
        self.name, self._array = name, array
        self.shape = array.shape

    def bits(self) -> Bits:
        kind = {"float32": "F32", "uint16": "BF16"}.get(self._array.dtype.name)
        if kind is None:
            raise _wrong_dtype(self.name, self._array.dtype.name)
        flat = np.ascontiguousarray(self._array).reshape(-1)
        return bring(self.name, flat.view(DTYPES[kind].bits), kind, "BF16").reshape(self.shape).copy()


class _Stored:
    """A tensor in a safetensors file."""

    def __init__(self, checkpoint: Checkpoint, name: str) -> None:
        self.name, self._checkpoint = name, checkpoint
        self._spec = checkpoint.layout.tensor(name)
        self.shape = self._spec.shape

    def bits(self) -> Bits:
        if self._spec.dtype == "F16" or not can_bring(self._spec.dtype, "BF16"):
            raise _wrong_dtype(self.name, self._spec.dtype)
        bits = bring(self.name, self._checkpoint.bits(self.name), self._spec.dtype, "BF16")
        return bits.reshape(self.shape).copy()


def _wrong_dtype(name: str, found: str) -> UsageError:
    return UsageError(
        f"{name} is {found}, and adapters are published in bfloat16, which would change its values: train the adapter "
        "in bfloat16 or float32."
    )


_Tensor = _Torch | _Array | _Stored


def _held(name: str, tensor: Any) -> _Torch | _Array:
    return _Array(name, tensor) if isinstance(tensor, np.ndarray) else _Torch(name, tensor)


# ------------------------------------------------------------ from a peft config and tensors


def _of_tensors(config: Mapping[str, Any], tensors: Mapping[str, _Tensor], what: str) -> PlainLora:
    _check_config(config, what)
    pairs: dict[str, dict[str, _Tensor]] = {}
    for name, tensor in tensors.items():
        plain = plain_name(name)
        end = next((end for end in (_A, _B) if plain.endswith(end)), None)
        if end is None or len(tensor.shape) != 2:
            raise _refusal(what, f"it has {name[:120]}")
        pairs.setdefault(plain.removesuffix(end), {})[end] = tensor
    modules = []
    for name, pair in sorted(pairs.items()):
        if len(pair) < 2:
            raise UsageError(f"{what} has only one of lora_A and lora_B of {name}: it was not saved whole.")
        a, b = pair[_A].bits(), pair[_B].bits()
        modules.append(_module(name, a, b, _alpha(config, name)))
    return _adapter(modules, config, what)


def _alpha(config: Mapping[str, Any], module: str) -> float:
    """The alpha that peft's config gives to a module."""
    patterns = config.get("alpha_pattern") or {}
    alpha = config.get("lora_alpha", 8)
    for pattern, own in patterns.items():
        try:
            found = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise UsageError(f"alpha_pattern: {pattern!r} is no regular expression ({error}).") from error
        if found:
            alpha = own
            break
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise UsageError(f"lora_alpha of {module} is {alpha!r}, and not a number.")
    return alpha


def _config_values(config: Any) -> Mapping[str, Any]:
    """A peft config as plain JSON values."""
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping):
        raise UsageError(
            f"The peft config is a {type(config).__name__}; give a LoraConfig, or what its to_dict() gives."
        )
    return json.loads(json.dumps(dict(values), default=_json_value))


def _json_value(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return str(getattr(value, "value", value))


def _check_config(config: Mapping[str, Any], what: str) -> None:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise _refusal(what, f"its peft_type is {str(kind)[:40]}")
    if config.get("bias", "none") != "none":
        raise _refusal(what, f"bias={str(config['bias'])[:20]!r} trains biases")
    for field, does in _STRAY.items():
        if config.get(field):
            raise _refusal(what, does)
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_ALTERS_BASE):
        raise _refusal(what, f"init_lora_weights={start!r} changes the base too")


# ------------------------------------------------------------ from a model


def _of_model(model: Any, adapter: str, checkpoint_name: Callable[[Any], Callable[[str], str]]) -> PlainLora:
    layers = {name: module for name, module in model.named_modules() if is_lora(module)}
    configs = _peft_configs(model)
    if not layers and not configs:
        raise UsageError("The model has no LoRA layers: give the model that get_peft_model() returned.")
    own = _own_name(model, adapter, configs, layers)
    config = _config_values(configs[own]) if own in configs else {}
    _check_config(config, f"the adapter {own!r}")
    in_checkpoint = checkpoint_name(model)
    modules = []
    for name, layer in layers.items():
        if own in layer.lora_A or own in (getattr(layer, "lora_embedding_A", None) or {}):
            plain = in_checkpoint(f"{plain_name(name)}.weight").removesuffix(".weight")
            modules.append(_of_layer(plain, layer, own, bool(config.get("use_rslora"))))
    return _adapter(sorted(modules, key=lambda module: module.name), config, f"the adapter {own!r}")


def _peft_configs(model: Any) -> Mapping[str, Any]:
    return next((module.peft_config for _, module in model.named_modules() if hasattr(module, "peft_config")), {})


def _own_name(model: Any, adapter: str, configs: Mapping[str, Any], layers: Mapping[str, Any]) -> str:
    """The name under which the model holds the adapter."""
    known = set(configs) | {name for layer in layers.values() for name in layer.lora_A}
    if adapter in known:
        return adapter
    active = {name for layer in layers.values() for name in _active(layer)} or set(known)
    if len(active) != 1:
        raise UsageError(
            f"The model has the adapters {', '.join(sorted(active))}: activate one, or name one of them with adapter=."
        )
    return active.pop()


def _active(layer: Any) -> list[str]:
    active = getattr(layer, "active_adapters", None)
    return list(layer.lora_A) if active is None else [name for name in active if name in layer.lora_A]


def _of_layer(name: str, layer: Any, own: str, rslora: bool) -> LoraModule:
    if own not in layer.lora_A:
        raise _refusal(f"the adapter of {name}", "it adapts an embedding")
    if getattr(layer, "disable_adapters", False):
        raise UsageError(f"The adapters of {name} are switched off: switch them on before publishing.")
    a, b = layer.lora_A[own], layer.lora_B[own]
    variant = (getattr(layer, "lora_variant", None) or {}).get(own)
    if variant is not None:
        raise _refusal(f"the adapter of {name}", f"it is the variant {type(variant).__name__}")
    if getattr(layer, "fan_in_fan_out", False):
        raise _refusal(f"the adapter of {name}", _STRAY["fan_in_fan_out"])
    if getattr(a, "bias", None) is not None or getattr(b, "bias", None) is not None:
        raise _refusal(f"the adapter of {name}", _STRAY["lora_bias"])
    weights = [getattr(part, "weight", None) for part in (a, b)]
    if any(weight is None or weight.dim() != 2 for weight in weights):
        raise _refusal(f"the adapter of {name}", "it is no pair of matrices, as that of a convolution")
    a_bits, b_bits = (_Torch(f"{name}.{part}", weight).bits() for part, weight in zip("AB", weights, strict=True))
    rank, scaling = a_bits.shape[0], float(layer.scaling[own])
    alpha = (getattr(layer, "lora_alpha", None) or {}).get(own)
    divisor = math.sqrt(rank) if rslora else rank
    if alpha is None or alpha / divisor != scaling:  # no peft layer, or one whose scaling was set by hand
        alpha = scaling * divisor
    return _module(name, a_bits, b_bits, alpha)


# ------------------------------------------------------------ checks of all


def _module(name: str, a: Bits, b: Bits, alpha: float) -> LoraModule:
    if a.shape[0] != b.shape[1] or not a.shape[0]:
        raise UsageError(f"lora_A of {name} is {a.shape} and lora_B {b.shape}: their ranks differ.")
    return LoraModule(name, a, b, alpha)


def _adapter(modules: list[LoraModule], config: Mapping[str, Any], what: str) -> PlainLora:
    if not modules:
        raise UsageError(f"{what} adapts no linear layer: there is nothing to publish.")
    return PlainLora(tuple(modules), config, bool(config.get("use_rslora")))


def _refusal(what: str, does: str) -> UsageError:
    return UsageError(f"{what[0].upper()}{what[1:]} is not plain LoRA of linear layers: {does}. So {MERGED}.")


def tensors_of(adapter: PlainLora) -> Iterator[tuple[str, Bits]]:
    """(peft's name, uint16 bits in bfloat16) of each of the adapter's tensors, as peft saves them."""
    for module in adapter.modules:
        yield f"{PEFT_PREFIX}{module.name}{_A}", module.a
        yield f"{PEFT_PREFIX}{module.name}{_B}", module.b
