"""Every causal architecture of the installed transformers, as small as its config allows.

One set of small numbers, assigned to the names that a config uses for them, builds most families; the others have
settings of their own. A family that cannot be built small is listed with the reason.
"""

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["EVERYDAY", "SHORT", "families", "tiny"]

MAX_PARAMETERS: Final = 6_000_000
"""Larger models would take minutes each, and only the architecture matters."""

EVERYDAY: Final = ("qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba")
"""A plain family, a mixture of experts fused on load, one stored fused, one whose first layers are dense, and one
without attention."""

SHORT: Final = (
    "llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "mixtral", "deepseek_v2", "deepseek_v3", "gpt2",
    "gpt_oss", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "phimoe", "mistral", "ministral", "olmo", "olmo2",
    "olmo3", "olmoe", "granite", "granitemoe", "falcon", "mamba", "mamba2", "jamba", "bamba", "cohere", "cohere2",
    "stablelm", "gpt_neox", "opt", "bloom", "mpt", "starcoder2", "glm4", "glm4_moe", "ernie4_5", "ernie4_5_moe",
    "smollm3", "nemotron", "hunyuan_v1_moe", "minimax_m2", "lfm2", "recurrent_gemma",
)  # fmt: skip
"""Commonly trained families, one or two of each kind of architecture."""

_SMALL: Final[dict[str, Any]] = {
    "vocab_size": 64, "vocab_size_per_layer_input": 64,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim", "emb_dim", "lru_width"), 32),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size",
         "block_ff_dim"), 48),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "sliding_window",
         "attention_window_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
         "num_encoder_layers", "num_decoder_layers", "num_experts_per_tok", "moe_k", "moe_topk", "num_key_value_heads",
         "num_kv_heads", "n_group", "linear_num_key_heads"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads", "encoder_attention_heads",
         "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "qk_rope_head_dim", "rotary_dim",
         "linear_num_value_heads", "time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(
        ("head_dim", "attention_head_size", "v_head_dim", "qk_nope_head_dim", "q_lora_rank", "kv_lora_rank",
         "linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_n_heads", "mamba_d_head",
         "mamba_num_heads", "mamba_head_dim", "state_size", "ssm_state_size", "chunk_size", "mamba_chunk_size",
         "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx"), 64),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

_OWN: Final[dict[str, dict[str, Any]]] = {
    "falcon": {"head_dim": None, "num_kv_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "xlstm": {"v_head_dim": None},
    "xlnet": {"max_position_embeddings": None},
    "reformer": {"is_decoder": True},
    "longcat_flash": {"zero_expert_num": 2, "ffn_hidden_size": 48},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "zamba": {"num_hidden_layers": 2, "layer_types": ["mamba", "hybrid"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "bamba": {"attn_layer_indices": [1]},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""Settings that a config needs beside the common numbers; None removes a setting."""


def families() -> list[str]:
    """Return the model types for which transformers has a causal language model."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(family: str, *, tied: bool, more: Mapping[str, Any] = {}, own: Mapping[str, Any] = {}) -> Any:
    """Return a small config of the family.

    `more`: other common numbers, for an engine without kernels for such small sizes; `own`: settings of this family.
    Raises any exception of the library, and `ValueError` when the model has more than `MAX_PARAMETERS`.
    """
    default = AutoConfig.for_model(family)
    kind = type(default)
    known = set(dir(default)) | set(inspect.signature(kind.__init__).parameters)
    renamed = getattr(kind, "attribute_map", {})
    small = _SMALL | dict(more)
    given = {key: value for key, value in small.items() if key in known and key not in renamed}
    if "qk_rope_head_dim" in given:  # here a head is the sum of two parts
        given.pop("head_dim", None)
        given["num_key_value_heads"] = given.get("num_attention_heads", 4)
    if hasattr(default, "is_decoder"):  # an encoder is causal only when used as a decoder
        given["is_decoder"] = True
    given |= _OWN.get(family, {}) | dict(own)
    given = {key: value for key, value in given.items() if value is not None}
    config = AutoConfig.for_model(family, **given, tie_word_embeddings=tied)
    with torch.device("meta"):
        ghost: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in ghost.parameters())
    if parameters > MAX_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} M parameters at the smallest")
    return config
