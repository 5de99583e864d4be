"""The model `tiny`: 3.2 million parameters, made in seconds.

Its warm-up shows it words with their letters in order, forwards and backwards; RL then teaches which is wanted.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from node.trainers.grpo.cache import cached_folder
from node.trainers.grpo.task import SortLetters
from node.trainers.grpo.warmup import IGNORED, Progress, fit, random_model, save_bf16

__all__ = ["TinyRecipe", "answers", "letters_tokenizer", "make_tiny", "tiny_folder"]


class TinyRecipe(msgspec.Struct, frozen=True):
    """Everything that decides the weights. Another recipe has another folder in the cache."""

    revision: int = 1
    """Grows when the code below makes other weights of the same numbers."""
    letters: int = 4
    wanted: float = 0.45
    """Share of warm-up answers that are sorted as wanted; the others are sorted backwards."""
    hidden: int = 256
    inner: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 32
    spread: float = 0.06
    """Standard deviation of the initial weights. The larger a bf16 value, the fewer of them change a step."""
    steps: int = 150
    """Few enough that RL has something left to teach, and that two cores make the model in less than 25 seconds."""
    rows: int = 64
    lr: float = 2e-3
    seed: int = 0


def tiny_folder(progress: Progress, recipe: TinyRecipe | None = None) -> Path:
    """The Hugging Face folder of `tiny`, from the cache or made now."""
    chosen = recipe or TinyRecipe()
    return cached_folder("tiny", chosen, lambda folder: make_tiny(folder, chosen, progress))


def make_tiny(folder: Path, recipe: TinyRecipe, progress: Progress) -> None:
    """Make, warm up and save `tiny` in `folder`. Leaves torch's global random state as it was."""
    model = random_model(
        recipe, initializer_range=recipe.spread, max_position_embeddings=64, eos_token_id=SortLetters.END,
        pad_token_id=SortLetters.END + 1, bos_token_id=None,
    )  # fmt: skip
    fit(
        model,
        answers(recipe),
        steps=recipe.steps,
        lr=recipe.lr,
        warmup_steps=10,
        progress=progress,
        what="warming up tiny",
    )
    save_bf16(model, folder)
    letters_tokenizer().save_pretrained(folder)


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token a letter, and the ids of `SortLetters`."""
    symbols = [*SortLetters.LETTERS, ">", "<end>", "<pad>", "<unk>"]
    tokenizer = Tokenizer(models.WordLevel({s: i for i, s in enumerate(symbols)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", unk_token="<unk>", model_max_length=64
    )


def answers(recipe: TinyRecipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches (ids, targets) of sorted answers, `wanted` of them forwards. Targets cover the answers only."""
    task, rng = SortLetters(recipe.letters), np.random.default_rng(recipe.seed)
    while True:
        prompts = task.prompts(0, recipe.rows, rng)
        wanted = rng.random(recipe.rows) < recipe.wanted
        rows = torch.tensor(
            [p + (task.answer(p) if w else task.backwards(p)) for p, w in zip(prompts, wanted, strict=True)]
        )
        ids, targets = rows[:, :-1], rows[:, 1:].clone()
        targets[:, : recipe.letters] = IGNORED
        yield ids, targets
