"""The tokens with which a text can still become what was asked for, by llguidance.

The transformers engine and SGLang's scheduler processes keep texts to their structures by it; vLLM does so by its own
means. Needs numpy and llguidance.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Guide", "Vocabulary"]

LEXER_STATES: Final = 50_000
"""Of one structure: about 75 MB. Its other limits are llguidance's own: some 20 ms for a structure, and for a token."""
_MOST_SAID: Final = 256
"""Characters of llguidance's reason."""


class Vocabulary:
    """The texts of a vocabulary's tokens, of which `ends` end a completion."""

    def __init__(self, texts: Path | None, size: int, ends: Sequence[int]) -> None:
        """`texts`: the base's tokenizer.json. `size`: logits of a row. Raises `ValueError` when there are none."""
        if texts is None or not texts.exists():
            raise ValueError("structure: the base has no tokenizer.json, and without one there is no text")
        self.size, self.ends = size, list(ends)
        if not ends:
            raise ValueError("structure: no token may end the completion")
        import llguidance

        self.tokenizer = llguidance.LLTokenizer(texts.read_text(), n_vocab=size, eos_token=self.ends)


class Guide:
    """Follows one text."""

    def __init__(self, vocabulary: Vocabulary, structure: Mapping[str, Any]) -> None:
        """`structure`: one of json (a schema), json_object, regex, choice and grammar (`node.engines.structures`).

        Raises `ValueError` for one that llguidance does not understand, or that could never end.
        """
        import llguidance

        self._vocabulary = vocabulary
        limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES)
        grammar = _grammar(llguidance.LLMatcher, structure)
        self._matcher = llguidance.LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
        if self._matcher.is_error():
            raise ValueError(f"structure: {self._matcher.get_error()[:_MOST_SAID]}")

    def copy(self) -> "Guide":
        """Another text of the same structure, at the same place."""
        other = Guide.__new__(Guide)
        other._vocabulary, other._matcher = self._vocabulary, self._matcher.deep_copy()
        return other

    def begin(self, tokens: Sequence[int]) -> None:
        """The text begins with these. Raises `ValueError` when no text of the structure does."""
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise ValueError("structure: no such text begins as the end of the prompt does")

    def add(self, token: int) -> None:
        """The text goes on with this token."""
        if not self._matcher.is_error():
            self._matcher.consume_token(token)

    def allowed(self) -> NDArray[np.bool_]:
        """Whether each token may come next: (vocabulary,). Only the ends where the text is complete, and where
        llguidance gives up because it has become too complex."""
        if self._matcher.is_error():
            out = np.zeros(self._vocabulary.size, bool)
            out[self._vocabulary.ends] = True
            return out
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self._vocabulary.size].astype(bool)


def _grammar(matcher: Any, structure: Mapping[str, Any]) -> str:
    if structure.get("regex") is not None:
        return matcher.grammar_from_regex(structure["regex"])
    if choice := structure.get("choice"):
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)
        return matcher.grammar_from_lark(f"start: {texts}")
    if structure.get("grammar") is not None:
        return matcher.grammar_from_lark(_as_lark(structure["grammar"]))
    schema = structure.get("json")
    return matcher.grammar_from_json_schema({"type": "object"} if schema is None else schema)


def _as_lark(grammar: str) -> str:
    """The grammar in the notation of Lark, converted if it is GBNF. Raises `ValueError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # a RecursionError, or what its reader raises, which has no class of its own
        raise ValueError(f"structure: the grammar cannot be read: {str(error)[:_MOST_SAID]}") from error
