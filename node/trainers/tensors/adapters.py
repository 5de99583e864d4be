"""Merges a model's adapters for publishing, without touching the model.

Nodes sample from the merged weights, while the trainer keeps base and adapters apart. Merging in place and unmerging
again would change the base by rounding, and so all later training. So each adapted layer is merged on a copy of that
layer, by peft's own code, and the copy is dropped after it was read. What is published equals `merge_and_unload`, bit
for bit, for every kind of adapter. An adapter that peft cannot merge cannot be published, and neither can one whose
merged weights are not what the trainer computes with. Custom layers in LoRA's shape, and sharded layers, are merged by
`node.trainers.tensors.lora`.
"""

import sys
from collections.abc import Iterator
from typing import Any, Final

from codec.errors import UsageError
from node.trainers.tensors import lora

__all__ = ["PEFT_PREFIX", "has_adapters", "merged"]

PEFT_PREFIX: Final = "base_model.model."
"""The prefix that peft gives to the parameter names of the model that it wraps."""
_NOT_STATIC: Final = {
    "XLORA": "mixes its adapters anew for each token",
    "POLY": "mixes its adapters by task",
    "SHADOW": "adds what depends on the input",
}
"""Kinds of adapter whose effect no change of the weights can equal, even where peft would merge them."""
_OTHER: Final = "Train an adapter that peft merges, LoRA for one"
_REMEDY: Final = (
    "Merge it yourself and publish an iterator of (checkpoint name, tensor), or train an adapter that merges"
)


def has_adapters(model: Any) -> bool:
    """Whether a layer of this module has adapters: peft's, or a custom layer in LoRA's shape."""
    if not hasattr(model, "modules"):
        return False
    return any(_is_adapted(module) for module in model.modules()) or _peft_model(model) is not None


def merged(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of the model's state with adapters merged, under the names that peft leaves.

    One layer at a time: a merged tensor is a copy, which the caller may drop. Raises `UsageError` naming the adapter
    when it cannot be merged, is switched off, or is sharded and more than plain LoRA.
    """
    _check_mergeable(model)
    layers: dict[str, Any] = {}
    for name, module in model.named_modules():
        if _is_adapted(module) and not any(owner in layers for owner in _owners(name)):
            layers[name] = module
    _check_shared(layers)
    done: set[str] = set()
    for name, tensor in model.state_dict().items():
        if name.startswith("base_model.") and not name.startswith(PEFT_PREFIX) and _peft_model(model) is model:
            continue  # tensors that peft's layers share, such as VeRA's projections
        owner = next((owner for owner in _owners(name) if owner in layers), None)
        if owner is None:
            yield name, tensor
        elif owner not in done:
            done.add(owner)
            yield from _merged_layer(owner, layers[owner])


def _check_shared(layers: dict[str, Any]) -> None:
    """Raises `UsageError` for two adapters on one tied weight: peft would merge both into it, one after the other."""
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        if not _is_tuner(layer):
            continue
        for parameter in layer.get_base_layer().parameters():
            if owners.setdefault(id(parameter), name) != name:
                raise UsageError(
                    f"{_shown(name)} and {_shown(owners[id(parameter)])} share one tied weight and each has an "
                    "adapter, which peft merges into it one after the other: adapt one that is not tied."
                )


def _merged_layer(name: str, layer: Any) -> Iterator[tuple[str, Any]]:
    prefix = f"{name}." if name else ""
    if not _is_peft(layer) or _adapts_shards(layer):
        yield from ((prefix + rest, tensor) for rest, tensor in lora.merged_layer(name, layer))
        return
    if any(getattr(module, "disable_adapters", False) for module in layer.modules() if _is_peft(module)):
        raise UsageError(f"The adapters of {_shown(name)} are switched off: switch them on before publishing.")
    state = _peft_merged(name, layer).state_dict()
    yield from ((prefix + rest, tensor) for rest, tensor in state.items())


def _peft_merged(name: str, layer: Any) -> Any:
    """The module that peft would put in the layer's place. Raises `UsageError` when peft cannot merge the adapter."""
    import torch

    tuned = any(_is_tuner(module) for module in layer.modules())
    copy = _copy_layer(layer, {}) if tuned else layer  # a module that is trained whole is only unwrapped
    try:
        with torch.no_grad():
            if hasattr(copy, "unload_and_optionally_merge_module"):
                return copy.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            copy.merge(safe_merge=False, adapter_names=None)
            return copy.get_base_layer()
    except (NotImplementedError, ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise UsageError(
            f"peft cannot merge the {_kind(layer)} adapter of {_shown(name)} ({error}). {_REMEDY}."
        ) from error


def _copy_layer(module: Any, copies: dict[int, Any]) -> Any:
    """A copy of a layer with its own parameters and buffers; other objects that it refers to stay shared.

    `copies`: id of what was copied already -> its copy, so that what is shared within the layer stays shared.
    """
    import torch

    if id(module) in copies:
        return copies[id(module)]
    layer = copies[id(module)] = module.__class__.__new__(module.__class__)
    attributes = {
        key: value.copy() if isinstance(value, dict | list | set) else value for key, value in module.__dict__.items()
    }

    def copied(tensor: Any) -> Any:
        if tensor is None:
            return None
        if id(tensor) not in copies:
            fresh = tensor.detach().clone()
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            copies[id(tensor)] = torch.nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh
        return copies[id(tensor)]

    attributes["_parameters"] = {key: copied(tensor) for key, tensor in module._parameters.items()}
    attributes["_buffers"] = {key: copied(tensor) for key, tensor in module._buffers.items()}
    attributes["_modules"] = {
        key: None if inner is None else _copy_layer(inner, copies) for key, inner in module._modules.items()
    }
    layer.__dict__.update(attributes)
    return layer


def _check_mergeable(model: Any) -> None:
    """Raises `UsageError` when the adapters of a peft model cannot be merged, whatever their layers are."""
    wrapped = _peft_model(model)
    if wrapped is None:
        return
    from peft.tuners.tuners_utils import BaseTuner

    configs = dict(wrapped.peft_config)
    kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs.values()}
    kinds.add(type(wrapped.base_model).__name__.removesuffix("Model").upper())
    for kind in sorted(kinds & set(_NOT_STATIC)):
        raise UsageError(f"The model's adapter is {kind}, which {_NOT_STATIC[kind]}: no weights equal it. {_OTHER}.")
    for adapter, config in configs.items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning:
            why = "changes what the model reads and not its weights"
            raise UsageError(f"The adapter {adapter!r} is {kind}, which {why}: no weights equal it. {_OTHER}.")
        if not isinstance(wrapped.base_model, BaseTuner):
            raise UsageError(f"The adapter {adapter!r} is {kind}, which peft cannot merge. {_REMEDY}.")
    try:
        wrapped.base_model._check_merge_allowed()
    except (NotImplementedError, ValueError) as error:
        line = " ".join(str(error).split())
        raise UsageError(f"peft does not merge this model's adapters ({line}). {_REMEDY}.") from error


def _peft_model(model: Any) -> Any:
    """The peft wrapper in the model, or None."""
    if "peft" not in sys.modules or not hasattr(model, "modules"):
        return None
    from peft import PeftMixedModel, PeftModel

    return next((module for module in model.modules() if isinstance(module, PeftModel | PeftMixedModel)), None)


def _is_tuner(module: Any) -> bool:
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    return isinstance(module, BaseTunerLayer)


def _is_peft(module: Any) -> bool:
    if "peft" not in sys.modules:
        return False
    from peft.utils.other import AuxiliaryTrainingWrapper

    return _is_tuner(module) or isinstance(module, AuxiliaryTrainingWrapper)


def _is_adapted(module: Any) -> bool:
    return _is_peft(module) or lora.is_lora(module)


def _adapts_shards(layer: Any) -> bool:
    sharded = any(hasattr(tensor, "placements") for tensor in layer.parameters())
    return sharded and any(_is_tuner(module) for module in layer.modules())


def _shown(name: str) -> str:
    return name.removeprefix(PEFT_PREFIX)


def _kind(layer: Any) -> str:
    """The kind of adapter for an error's text: the name of peft's package for it, or of the class."""
    module = type(layer).__module__
    return module.split(".")[2] if module.startswith("peft.tuners.") else type(layer).__name__


def _owners(name: str) -> Iterator[str]:
    """Names of the modules that contain a parameter or module, innermost first; the last is "", the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name
