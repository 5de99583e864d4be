"""A task whose answers look like those of a chat model: a sentence of some ten tokens that ends by itself.

The task of the size `smollm2` (`node.trainers.grpo.smollm2.Sums`) has answers of four tokens, too few to measure on.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np

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
FORMAT: Final = (
    "<|im_start|>user\nWrite one short sentence with the words {} and {}.<|im_end|>\n<|im_start|>assistant\n"
)
END: Final = "<|im_end|>"

Tokens = tuple[int, ...]


class Sentences:
    """Write a short sentence with two given words. The reward is a third for each of: first word, second word, an end
    within `max_tokens`. See `node.trainers.grpo.task.Task`."""

    def __init__(self, tokenizer: Any, max_tokens: int = 48) -> None:
        """`tokenizer`: of a chat model whose turns are written as in `FORMAT`."""
        self._tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.stop_tokens: Tokens = (tokenizer.convert_tokens_to_ids(END),)
        self._asked: dict[Tokens, tuple[str, str]] = {}
        for first in WORDS:
            for second in WORDS:
                if first != second:
                    text = FORMAT.format(first, second)
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
        """The task for the tokenizer in a model's folder."""
        from transformers import AutoTokenizer

        return cls(AutoTokenizer.from_pretrained(folder, local_files_only=True))
