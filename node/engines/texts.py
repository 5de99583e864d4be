"""The text of a continuation, token by token, and the stop texts in it. Needs `tokenizers` only.

The gateway cuts answers and engines end samples by this same code, so that they never disagree about where a stop text
is. It is how vLLM does it, too: a `DecodeStream` that is given the prompt first, so that the first token keeps the
space that it begins with.
"""

from collections.abc import Sequence
from typing import Any, Final

__all__ = ["Continuation", "StopText"]


PRIMED: Final = 32
"""Tokens of the prompt that are decoded first: enough to know whether the first token begins with a space."""


class Continuation:
    """Text of the tokens that follow `prompt`. Bytes that are no whole character yet wait for the next token."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, special: bool = False) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`. `special`: special tokens are part of the text."""
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._fresh = tokenizer, lambda: DecodeStream(skip_special_tokens=not special)
        self._stream = DecodeStream(ids=list(prompt[-PRIMED:]), skip_special_tokens=not special)

    def add(self, token: int) -> str:
        """What `token` adds to the text."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers raises nothing narrower
            if "Invalid prefix" not in str(error):
                raise
            self._stream = self._fresh()  # bytes that are no text, and never will be: begin behind them, as vLLM does
            return self._stream.step(self._tokenizer, token) or ""


class StopText:
    """Finds the first of `stops` in the text of a continuation. One that ends in the text of the first `least` tokens
    does not count."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str], *, special: bool = False, least: int = 0
    ) -> None:
        self._text = Continuation(tokenizer, prompt, special=special)
        self._stops, self._least = tuple(stops), least
        self._held = max(map(len, stops), default=1) - 1
        """Characters of the text before that a stop text may begin in."""
        self._tail = ""
        self._tokens = self._length = 0
        self.span: tuple[int, int] | None = None
        """Where in the text the stop text is that was found."""

    def add(self, token: int) -> bool:
        """`token` completes a stop text. Of several it is the one that ends first, and of those the longest."""
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
