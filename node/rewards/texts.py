"""Prompts and completions as the texts that reward functions get, by the tokenizer of the model's folder.

The completion is the text that OpenAI clients get for these tokens: without special tokens, and with its leading space.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from node.gateway.text import Text

__all__ = ["NO_TOKENIZER", "Texts"]

MAX_FILE_BYTES: Final = 256 << 20
"""Of a file beside the weights. The largest tokenizers have 40 MB."""
NO_TOKENIZER: Final = "the model has no tokenizer.json, so its tokens have no text"


class Texts:
    """The texts of one model. `folder`: its config and tokenizer; read when the first text is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._text: Text | None = None

    def of(self, prompt: Sequence[int], token_ids: Sequence[int]) -> tuple[str, str]:
        """(the prompt with its special tokens, the completion without). Raises `ValueError` without a tokenizer,
        `UsageError` for one that is damaged."""
        if self._text is None:
            self._text = Text({path.name: path.read_bytes() for path in self._folder.iterdir() if _is_small(path)})
        if not self._text.has_tokenizer:
            raise ValueError(NO_TOKENIZER)
        return self._text.decode((), prompt, special=True), self._text.decode(prompt, token_ids)


def _is_small(path: Path) -> bool:
    return path.suffix != ".safetensors" and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES
