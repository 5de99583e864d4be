"""Loading a Hugging Face folder, for engines and trainers alike."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from codec.errors import UsageError

__all__ = ["build_model", "load_model"]


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model in `folder`, its weights as `dtype`, without dropout. Never looks on the network.

    Raises `UsageError` when there is none, or it is damaged or of an unknown architecture.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json: give a Hugging Face model folder.")
    disable_progress_bar()  # ours says what takes long; theirs would draw over it
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        # In this order: missing files, unknown architectures, tensors of other shapes, cut or altered weights.
        raise UsageError(f"{folder} cannot be loaded as a causal language model: {error}") from error
    return model.to(device).eval()


def build_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model that the config in `folder` describes; its parameters hold nothing of use yet.

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
