"""The text of a continuation, token by token, and the stop texts in it. Needs `tokenizers` only.

The gateway cuts answers, and engines end samples, by this code, so they never disagree about where a stop text is. vLLM
does the same: it feeds a `DecodeStream` the prompt first, so that the first token keeps its leading space.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["Continuation", "StopText", "TokenizerFile"]

PRIMED: Final = 32
"""The last tokens of the prompt that are decoded first: enough to tell whether the first token begins with a space."""


class TokenizerFile:
    """The tokenizer.json of a checkpoint, which may be missing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._read: Any = None

    def read(self) -> Any:
        """The `tokenizers.Tokenizer` in it, read once; None where there is no file."""
        if self._read is None and self.path is not None and self.path.exists():
            from tokenizers import Tokenizer

            self._read = Tokenizer.from_file(str(self.path))
        return self._read


class Continuation:
    """The text of the tokens that follow `prompt`. The bytes of an incomplete character wait for the next token."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, special: bool = False) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`. `special`: special tokens are part of the text."""
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._fresh = tokenizer, lambda: DecodeStream(skip_special_tokens=not special)
        self._stream = DecodeStream(ids=list(prompt[-PRIMED:]), skip_special_tokens=not special)

    def add(self, token: int) -> str:
        """The text that `token` adds; empty while a character is incomplete."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            self._stream = self._fresh()  # the bytes so far are not UTF-8: start again after them, as vLLM does
            return self._stream.step(self._tokenizer, token) or ""


class StopText:
    """Finds the first of `stops` in the text of a continuation.

    A stop text that ends within the first `least` tokens does not count.
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str], *, special: bool = False, least: int = 0
    ) -> None:
        self._text = Continuation(tokenizer, prompt, special=special)
        self._stops, self._least = tuple(stops), least
        self._held = max(map(len, stops), default=1) - 1
        """Characters at the end of the text so far in which a stop text may begin."""
        self._tail = ""
        self._tokens = self._length = 0
        self.span: tuple[int, int] | None = None
        """(start, end) in the text of the stop text that was found, in characters; None before."""

    def add(self, token: int) -> bool:
        """Whether `token` completes a stop text.

        Of several stop texts, `span` is the one that ends first, and of those the longest.
        """
        self._tokens += 1
        added = self._text.add(token)
        text = self._tail + added
        if added and self._tokens > self._least:
            offset = self._length - len(self._tail)
            ends: list[tuple[int, int]] = []
            for stop in self._stops:
                at = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
                if at >= 0:
                    ends.append((offset + at + len(stop), offset + at))
            if ends:
                end, begin = min(ends)
                self.span = (begin, end)
        self._length += len(added)
        self._tail = text[-self._held :] if self._held else ""
        return self.span is not None
