"""A task whose answers look like those of a chat model: a sentence of some thirty tokens that ends by itself.

The task of the size `smollm2` (`node.trainers.grpo.smollm2.Sums`) has answers of four tokens, too few to measure on.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

from codec.errors import UsageError

__all__ = ["WORDS", "Sentences"]

WORDS: Final = [
    "river",
    "bread",
    "window",
    "garden",
    "letter",
    "music",
    "winter",
    "doctor",
    "bridge",
    "paper",
    "forest",
    "market",
    "horse",
    "island",
    "kitchen",
    "stone",
    "teacher",
    "summer",
    "ocean",
    "mirror",
    "engine",
    "village",
    "candle",
    "shadow",
    "flower",
    "mountain",
    "story",
    "silver",
    "morning",
    "dragon",
]
"""Common words, so that a small model uses them."""
ASK: Final = "Write one short sentence with the words {} and {}."
FORMAT: Final = f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n"
END: Final = "<|im_end|>"
PLAIN: Final = f"{ASK}\nSentence:"
"""For a tokenizer that has no token `END`: its answers end with the token that ends its texts."""

Tokens = tuple[int, ...]


class Sentences:
    """Write a short sentence with two given words. The reward is a third for each of: first word, second word, an end
    within `max_tokens`. See `node.trainers.grpo.task.Task`."""

    def __init__(self, tokenizer: Any, max_tokens: int = 48) -> None:
        """`tokenizer`: of a model whose turns are written as in `FORMAT`, or of any other. Raises `UsageError` for one
        that has no token for the end of a text."""
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        chat = END in tokenizer.get_vocab()
        end = tokenizer.convert_tokens_to_ids(END) if chat else tokenizer.eos_token_id
        if end is None:
            raise UsageError("The model's tokenizer has no token that ends a text, so no answer of it ends by itself.")
        self.stop_tokens: Tokens = (end,)
        self._asked: dict[Tokens, tuple[str, str]] = {}
        for first in WORDS:
            for second in WORDS:
                if first != second:
                    text = (FORMAT if chat else PLAIN).format(first, second)
                    self._asked[tuple(tokenizer.encode(text, add_special_tokens=False))] = (first, second)
        self._prompts = list(self._asked)

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[Tokens]:
        """See `Task.prompts`."""
        return [self._prompts[i] for i in rng.choice(len(self._prompts), count, replace=False)]

    def score(self, prompt: Tokens, answer: Tokens) -> float:
        """See `Task.score`."""
        text = self._tokenizer.decode(list(answer)).lower()
        met = [word in text for word in self._asked[prompt]] + [answer[-1] in self.stop_tokens]
        return sum(met) / len(met)

    @classmethod
    def of(cls, folder: Path) -> "Sentences":
        """The task for the tokenizer in a model's folder. Raises `UsageError` when it has none."""
        from transformers import AutoTokenizer

        if not any(folder.glob("tokenizer*")):  # transformers would make an empty one
            raise UsageError(f"{folder} has no tokenizer: copy the files tokenizer* of its base into it.")
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UsageError(f"{folder} has a tokenizer that cannot be loaded: {error}") from error
        return cls(tokenizer)
