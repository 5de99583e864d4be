"""What a policy is trained to do: prompts, and a scorer that can verify an answer."""

from typing import Final, Protocol

import numpy as np

__all__ = ["SortLetters", "Task"]

Tokens = tuple[int, ...]


class Task(Protocol):
    """A verifiable reward. Both methods depend on their arguments only, so all hosts and runs agree on the results."""

    max_tokens: int
    """Tokens of an answer at most."""

    stop_tokens: Tokens
    """Tokens that end an answer."""

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[Tokens]:
        """`count` prompts for a step; all randomness comes from `rng`."""
        ...

    def score(self, prompt: Tokens, answer: Tokens) -> float:
        """The reward of an answer, 0 to 1."""
        ...


class SortLetters:
    """Put the letters of a word in order: `dbca>` asks for `abcd`, then the end token.

    The reward is 1 for exactly that, else 0. Tokens: letter k has the id k, `>` is `ASK`, the end token is `END`.
    """

    ASK: Final = 26
    END: Final = 27
    LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"

    def __init__(self, letters: int = 8) -> None:
        """`letters`: in each word."""
        self.letters = letters
        self.max_tokens = letters + 1
        self.stop_tokens: Tokens = (self.END,)

    def prompts(self, step: int, count: int, rng: np.random.Generator) -> list[Tokens]:
        """See `Task.prompts`."""
        words = rng.integers(0, len(self.LETTERS), (count, self.letters))
        return [(*word, self.ASK) for word in words.tolist()]

    def answer(self, prompt: Tokens) -> Tokens:
        """The right answer."""
        return (*sorted(prompt[:-1]), self.END)

    def backwards(self, prompt: Tokens) -> Tokens:
        """The letters in reverse order, a wrong answer that a base model learns too."""
        return (*sorted(prompt[:-1], reverse=True), self.END)

    def score(self, prompt: Tokens, answer: Tokens) -> float:
        """See `Task.score`."""
        return float(answer == self.answer(prompt))
