"""Prompts and completions as the texts that reward functions get, by the tokenizer of the model's folder.

The completion is the text that the gateway gives for these tokens: without special tokens, and with its leading space.
Needs `tokenizers` only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from node.engines.texts import Continuation

__all__ = ["NO_TOKENIZER", "Texts"]

NO_TOKENIZER: Final = "the model has no tokenizer.json, so its tokens have no text"


class Texts:
    """The texts of one model. `folder`: has its tokenizer; read when the first text is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> tuple[str, str]:
        """(the prompt with its special tokens, the completion without). Raises `UsageError`, with a clause that says
        why there is no text."""
        self.load()
        try:
            before = self._tokenizer.decode(list(prompt), skip_special_tokens=False)
            text = Continuation(self._tokenizer, prompt)
            return before, "".join(text.add(token) for token in token_ids)
        except Exception as error:  # tokenizers raises nothing narrower
            raise UsageError(f"its tokens have no text: {error}") from error

    def load(self) -> None:
        """Load the tokenizer, unless it is loaded. Raises `UsageError` as `of` does."""
        if self._tokenizer is not None:
            return
        file = self._folder / "tokenizer.json"
        if not file.is_file():
            raise UsageError(NO_TOKENIZER)
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UsageError("the package tokenizers is not installed here") from error
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises nothing narrower
            raise UsageError(f"{file} is damaged: {error}") from error
