"""Keeps the rows of a cohort to what `SamplingOptions.structure` allows, with llguidance.

At each step llguidance gives the tokens with which the text so far can still become what was asked for. All others get
the logit -inf. When the text is complete, only the tokens that end a completion are left; so too where llguidance gives
up, because a text has become too complex for it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from node.engines.base import SamplingParams
from node.engines.structures import Structure, read_structure
from node.settings.extras import how_to_get, lacking

__all__ = ["Constraints", "can_constrain"]

MODULE: Final = "llguidance"
LEXER_STATES: Final = 50_000
"""Of one structure: about 75 MB. Its other limits are llguidance's own: some 20 ms for a structure, and for a token."""


def can_constrain() -> bool:
    """Whether llguidance is installed here."""
    return not lacking((MODULE,))


class Constraints:
    """Of the rows of one cohort."""

    def __init__(
        self, texts: Path | None, vocabulary: int, sampling: SamplingParams, prompts: Sequence[Sequence[int]]
    ) -> None:
        """`texts`: the base's tokenizer.json. `vocabulary`: logits of a row. `prompts`: the tokens of each row's.

        Raises `ValueError` for a structure that llguidance does not understand, for one that could never end, and for
        a text that the prompt begins otherwise than the structure allows.
        """
        if not can_constrain():
            raise ValueError(f"structure: this engine needs llguidance: {how_to_get('torch')}")
        if texts is None or not texts.exists():
            raise ValueError("structure: the base has no tokenizer.json, and without one there is no text")
        ends = [token for token in sampling.stop_tokens if token < vocabulary]
        if not ends:
            raise ValueError("structure: no token may end the completion")
        import llguidance

        tokenizer = llguidance.LLTokenizer(texts.read_text(), n_vocab=vocabulary, eos_token=ends)
        structure = read_structure(sampling.extra.structure)
        grammar = _grammar(llguidance.LLMatcher, structure)
        limits = llguidance.LLParserLimits(max_lexer_states=LEXER_STATES)
        first = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if first.is_error():
            raise ValueError(f"structure: {first.get_error()[:256]}")
        self._ends = ends
        self._matchers = [first, *(first.deep_copy() for _ in prompts[1:])]
        for matcher, prompt in zip(self._matchers, prompts, strict=True):
            if structure.begun and not matcher.consume_tokens(list(prompt[-structure.begun :])):
                raise ValueError("structure: no such text begins as the end of the prompt does")
        self._vocabulary = vocabulary

    def masked(self, logits: torch.Tensor, running: Sequence[bool]) -> torch.Tensor:
        """`logits` with -inf for what the `running` rows must not draw. Rows beyond them are padding."""
        allowed = np.ones((logits.shape[0], self._vocabulary), bool)
        for row, (matcher, runs) in enumerate(zip(self._matchers, running, strict=True)):
            if runs and matcher.is_error():
                allowed[row] = False
                allowed[row, self._ends] = True
            elif runs:
                bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
                allowed[row] = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        return logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), float("-inf"))

    def add(self, tokens: Sequence[int], running: Sequence[bool]) -> None:
        """The `running` rows drew these tokens."""
        for matcher, token, runs in zip(self._matchers, tokens, running, strict=True):
            if runs and not matcher.is_error():
                matcher.consume_token(token)


def _grammar(matcher: Any, structure: Structure) -> str:
    if structure.regex is not None:
        return matcher.grammar_from_regex(structure.regex)
    if structure.choice:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return matcher.grammar_from_lark(f"start: {texts}")
    return matcher.grammar_from_json_schema({"type": "object"} if structure.json is None else structure.json)
