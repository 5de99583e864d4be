"""The tensors of a Megatron-core GPT model under the names of its Hugging Face checkpoint, for `Swarm.publish`.

    tensors = checkpoint_tensors(model, vocabulary=151936)      # on every rank: gathering is a collective
    publish_from_rank_0(swarm if rank == 0 else None, tensors, step=step)

For dense decoders whose tensors are named as Llama, Qwen2 and Qwen3 name theirs, with any tensor parallelism, and for
layers of either of Megatron-core's specs (its own modules, or Transformer Engine's). For other models, and for pipeline
stages, Megatron-Bridge gives such an iterator (`AutoBridge.export_hf_weights`). Written for Megatron-core 0.16.1.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from codec.errors import UsageError
from node.trainers.tensors.sharding import is_sharded

__all__ = ["checkpoint_tensors"]

_BRIDGE: Final = "publish Megatron-Bridge's export_hf_weights(...)"
_LAYER: Final = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OUTSIDE: Final = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_INSIDE: Final = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def checkpoint_tensors(model: Any, vocabulary: int) -> Iterator[tuple[str, Any]]:
    """(checkpoint name, whole tensor) of a `GPTModel`. All of its tensor-parallel ranks iterate to the end.

    `model`: the model itself, in Megatron's wrappers (Float16Module, DistributedDataParallel), or the list of one that
    Megatron's `get_model` and `setup_model_and_optimizer` return. `vocabulary`: rows of the checkpoint's embedding, to
    which Megatron adds some so that its ranks get as many each. Raises `UsageError` for stages of a pipeline, for
    parameters that FSDP shards, and for one that such a checkpoint lacks, an expert's for example.
    """
    model = _unwrapped(model)
    if model.config.pipeline_model_parallel_size > 1:
        raise UsageError(f"A pipeline stage has only its own layers: {_BRIDGE}.")
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise UsageError(f"{name} is sharded by FSDP, which is not gathered here: {_BRIDGE}.")
        parts = _parts(parameter)
        layer = _LAYER.fullmatch(name)
        if name in _OUTSIDE:
            whole = _joined(parameter, parts)
            yield _OUTSIDE[name], whole if whole.dim() == 1 else whole[:vocabulary]
        elif layer is not None and layer[2] in _INSIDE:
            yield f"model.layers.{layer[1]}.{_INSIDE[layer[2]]}", _joined(parameter, parts)
        elif layer is not None and layer[2] in ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias"):
            for at, found in enumerate(("gate_proj", "up_proj")):
                whole = _cat([part.chunk(2)[at] for part in parts])
                yield f"model.layers.{layer[1]}.mlp.{found}.{layer[2].rpartition('.')[2]}", whole
        elif layer is not None and layer[2] in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
            for found, whole in zip("qkv", _qkv(_cat(parts), model.config), strict=True):
                yield f"model.layers.{layer[1]}.self_attn.{found}_proj.{layer[2].rpartition('.')[2]}", whole
        else:
            raise UsageError(f"{name}: {_BRIDGE}, which knows such models.")


def _unwrapped(model: Any) -> Any:
    """The `GPTModel` in a list of one and in wrappers."""
    if isinstance(model, list | tuple):
        if len(model) > 1:
            raise UsageError(
                f"A list of {len(model)} models is a virtual pipeline, and each has some layers: {_BRIDGE}."
            )
        if not model:
            raise UsageError("The list has no model: give what Megatron's get_model has returned.")
        model = model[0]
    while (inner := getattr(model, "module", getattr(model, "_orig_mod", None))) is not None:
        model = inner
    if not hasattr(model, "named_parameters") or not hasattr(model, "config"):
        raise UsageError(
            f"Give a GPTModel of Megatron-core, or get_model's list of one, and no {type(model).__name__}."
        )
    return model


def _parts(parameter: Any) -> list[Any]:
    """What each tensor-parallel rank holds of a parameter; of one that is not divided, this rank's own."""
    import torch.distributed as dist
    from megatron.core import parallel_state  # pyright: ignore[reportMissingImports]

    own = parameter.detach().contiguous()
    world = parallel_state.get_tensor_model_parallel_world_size()
    if world == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return [own]
    parts = [own.new_empty(own.shape) for _ in range(world)]
    dist.all_gather(parts, own, group=parallel_state.get_tensor_model_parallel_group())
    return parts


def _joined(parameter: Any, parts: list[Any]) -> Any:
    return parts[0] if len(parts) == 1 else _cat(parts, parameter.partition_dim)


def _cat(parts: list[Any], dim: int = 0) -> Any:
    import torch

    return torch.cat(parts, dim)


def _qkv(whole: Any, config: Any) -> tuple[Any, Any, Any]:
    """Divide linear_qkv: for each group of queries, the rows of its query heads, of its key and of its value."""
    groups, per_group = config.num_query_groups, config.num_attention_heads // config.num_query_groups
    rows = whole.reshape(groups, per_group + 2, config.kv_channels, *whole.shape[1:])
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    query, key, value = (part.reshape(-1, *whole.shape[1:]) for part in parts)
    return query, key, value
