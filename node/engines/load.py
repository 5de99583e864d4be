"""Loads a Hugging Face folder, for engines and trainers."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from codec.errors import UsageError

__all__ = ["build_model", "chosen_dtype", "load_model"]


def chosen_dtype(folder: Path, arithmetic: str, device: torch.device) -> torch.dtype:
    """The dtype that a model computes in: `arithmetic` (bfloat16, float16, float32), or "auto".

    "auto": float32 on a CPU; elsewhere the one of them that the folder's config names, or float32 if it names none.
    """
    named = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if arithmetic == "auto" and device.type != "cpu":
        try:
            config = json.loads((folder / "config.json").read_bytes())
            inner = config.get("text_config") or {}
            parts = (config, inner if isinstance(inner, dict) else {})
            arithmetic = next(str(p[key]) for p in parts for key in ("dtype", "torch_dtype") if p.get(key))
        except (OSError, ValueError, AttributeError, StopIteration):
            pass  # the loading that follows reports a missing or broken config
    return named.get(arithmetic.removeprefix("torch."), torch.float32)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model in `folder`, its weights as `dtype`, without dropout. Does not use the network.

    Raises `UsageError` when there is none, or it is damaged or of an unknown architecture.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: give a Hugging Face model folder.")
    disable_progress_bar()  # it would draw over the output of ours
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # In this order: missing files, unknown architectures, tensors of other shapes, truncated or altered weights.
        raise UsageError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    return model.to(device).eval()


def build_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model that the config in `folder` describes. Its parameters are not initialized.

    Raises `UsageError` as `load_model` does.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: give a Hugging Face model folder.")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with no_init_weights():
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"{folder} does not describe a causal language model: {error}") from error
    return model.to(device).eval()
