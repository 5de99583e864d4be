"""Random models, and the supervised training that brings one to where RL can start."""

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

__all__ = ["IGNORED", "Progress", "fit", "random_model", "save_bf16"]

Progress = Callable[[str], None]
"""Called with a line of text about what is being made."""

IGNORED = -100
"""A target that the loss leaves out: `torch.nn.functional.cross_entropy`'s default `ignore_index`."""


def random_model(recipe: Any, *, tied: bool = True, **more: Any) -> PreTrainedModel:
    """A Qwen3 of random weights as a recipe (`TinyRecipe`, `SmallRecipe`) has it; `more`: of its config. Leaves torch's
    global random state as it was."""
    config = Qwen3Config(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.inner,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.hidden // recipe.heads,
        tie_word_embeddings=tied,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return Qwen3ForCausalLM(config)


def fit(
    model: PreTrainedModel,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    *,
    steps: int,
    lr: float,
    warmup_steps: int,
    progress: Progress,
    what: str,
) -> None:
    """Train on `steps` batches of (ids, targets), both int64 (rows, width), by AdamW.

    `targets[:, t]` is what should follow `ids[:, : t + 1]`, or `IGNORED`. The rate rises to `lr` over `warmup_steps`
    and falls along a cosine to a twentieth of it. `what`: the first words of each line of progress, at most one a
    second.
    """
    adam = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.05)
    model.train()
    reported = time.monotonic()
    for step, (ids, targets) in zip(range(1, steps + 1), batches, strict=False):
        fall = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in adam.param_groups:
            group["lr"] = lr * min(1.0, step / warmup_steps) * fall
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if step == steps or time.monotonic() - reported > 1.0:
            reported = time.monotonic()
            progress(f"{what}: step {step} of {steps}, loss {loss.item():.2f}")
    model.eval()


def save_bf16(model: Any, folder: Path) -> None:
    """Round a transformers model to bf16, in place, and write its config and safetensors file to `folder`."""
    disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
