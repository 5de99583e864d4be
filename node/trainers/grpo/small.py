"""The model `small`: 28.3 million parameters, pre-trained for some minutes, and its task.

It has few and wide matrices, so that most of its blocks of 2^20 elements are full, as in a large model. It is trained
on Python's standard library, which every machine that runs this has. Its task is to continue a piece of held-out
source: even a crude model gets some of this soft reward, so its RL steps change the weights as real ones do.
"""

import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from codec.errors import UsageError
from node.trainers.grpo.cache import cached_folder
from node.trainers.grpo.task import Tokens
from node.trainers.grpo.warmup import Progress, fit, random_model, save_bf16

__all__ = ["ContinueText", "SmallRecipe", "make_small", "small_folder"]

WINDOWS_FILE = "windows.npy"


class SmallRecipe(msgspec.Struct, frozen=True):
    """Everything that decides the weights, except the text of the standard library."""

    revision: int = 2
    vocabulary: int = 4096
    hidden: int = 1024
    inner: int = 3072
    layers: int = 2
    heads: int = 16
    kv_heads: int = 4
    text_characters: int = 10_000_000
    steps: int = 300
    rows: int = 12
    width: int = 64
    lr: float = 1.5e-3
    windows: int = 4096
    """Held-out pieces of `width` tokens: the first half is the prompt, the second half the perfect answer."""
    seed: int = 0


class ContinueText:
    """Continue a window of held-out text. The reward is the share of the true tokens that the answer contains."""

    def __init__(self, windows: NDArray[np.int64]) -> None:
        """`windows`: token ids, int64, (count, width)."""
        half = windows.shape[1] // 2
        self.max_tokens = windows.shape[1] - half
        self.stop_tokens: Tokens = ()
        self._prompts: list[Tokens] = [tuple(row) for row in windows[:, :half].tolist()]
        self._truth = dict(zip(self._prompts, (Counter(row) for row in windows[:, half:].tolist()), strict=True))

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[Tokens]:
        """See `Task.prompts`."""
        return [self._prompts[i] for i in rng.choice(len(self._prompts), count, replace=False)]

    def score(self, prompt: Tokens, answer: Tokens) -> float:
        """See `Task.score`."""
        return (self._truth[prompt] & Counter(answer)).total() / self.max_tokens

    @classmethod
    def of(cls, folder: Path) -> "ContinueText":
        """The task whose windows are saved in the folder of `small`."""
        return cls(np.load(folder / WINDOWS_FILE))


def small_folder(progress: Progress, recipe: SmallRecipe | None = None) -> Path:
    """The Hugging Face folder of `small`, from the cache or made now. Raises what `make_small` raises."""
    chosen = recipe or SmallRecipe()
    return cached_folder("small", chosen, lambda folder: make_small(folder, chosen, progress))


def make_small(folder: Path, recipe: SmallRecipe, progress: Progress) -> None:
    """Make and pre-train `small` in `folder`. Raises `UsageError` when Python's library has too little source."""
    progress("reading the standard library")
    text = list(_library(recipe))
    tokenizer = _tokenizer(text, recipe)
    ids = np.fromiter((i for e in tokenizer.encode_batch(text) for i in e.ids), np.int64)
    held_out = recipe.windows * recipe.width
    if len(ids) < 2 * held_out:
        raise UsageError(f"{_library_folder()} holds too little text to learn from: install Python with its library.")
    windows = _with_distinct_prompts(ids[-held_out:].reshape(recipe.windows, recipe.width))
    model = random_model(recipe, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    fit(
        model,
        _batches(ids[:-held_out], recipe),
        steps=recipe.steps,
        lr=recipe.lr,
        warmup_steps=30,
        progress=progress,
        what="pre-training small",
    )
    save_bf16(model, folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", model_max_length=512).save_pretrained(folder)
    np.save(folder / WINDOWS_FILE, windows)


def _library_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _library(recipe: SmallRecipe) -> Iterator[str]:
    """The text of source files in a fixed shuffled order, until there is enough; no tests, no installed packages."""
    root = _library_folder()
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
    files = sorted(file for file in root.rglob("*.py") if not unwanted & set(file.relative_to(root).parts))
    characters = 0
    for i in np.random.default_rng(recipe.seed).permutation(len(files)):
        if characters > recipe.text_characters:
            return
        text = files[i].read_text("utf8", errors="ignore")
        characters += len(text)
        yield text


def _tokenizer(text: list[str], recipe: SmallRecipe) -> Tokenizer:
    """A byte-level BPE tokenizer, which can encode any text, trained on a third of the files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text[: 1 + len(text) // 3], trainer)
    return tokenizer


def _batches(ids: NDArray[np.int64], recipe: SmallRecipe) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    rng = np.random.default_rng(recipe.seed)
    while True:
        starts = rng.integers(0, len(ids) - recipe.width, recipe.rows)
        rows = torch.from_numpy(np.stack([ids[at : at + recipe.width + 1] for at in starts]))
        yield rows[:, :-1], rows[:, 1:]


def _with_distinct_prompts(windows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first window of each prompt, in order: a prompt must have one true answer."""
    _, first = np.unique(windows[:, : windows.shape[1] // 2], axis=0, return_index=True)
    return windows[np.sort(first)]
