"""Keeps the rows of a cohort to what `SamplingOptions.structure` allows, with llguidance.

At each step llguidance gives the tokens with which the text so far can still become what was asked for
(`swarm_vllm.guide`). All others get the logit -inf.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from node.engines.base import SamplingParams
from node.engines.structures import read_structure
from node.engines.vllm.plugin.swarm_vllm.guide import Guide, Vocabulary
from node.settings.extras import how_to_get, lacking

__all__ = ["Constraints", "can_constrain"]

MODULE: Final = "llguidance"


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
        known = Vocabulary(texts, vocabulary, [token for token in sampling.stop_tokens if token < vocabulary])
        structure = read_structure(sampling.extra.structure)
        first = Guide(known, msgspec.to_builtins(structure))
        self._guides = [first, *(first.copy() for _ in prompts[1:])]
        for guide, prompt in zip(self._guides, prompts, strict=True):
            guide.begin(prompt[-structure.begun :] if structure.begun else ())
        self._vocabulary = vocabulary

    def masked(self, logits: torch.Tensor, running: Sequence[bool]) -> torch.Tensor:
        """`logits` with -inf for what the `running` rows must not draw. Rows beyond them are padding."""
        allowed = np.ones((logits.shape[0], self._vocabulary), bool)
        for row, (guide, runs) in enumerate(zip(self._guides, running, strict=True)):
            if runs:
                allowed[row] = guide.allowed()
        return logits.masked_fill(torch.from_numpy(~allowed).to(logits.device), float("-inf"))

    def add(self, tokens: Sequence[int], running: Sequence[bool]) -> None:
        """The `running` rows drew these tokens."""
        for guide, token, runs in zip(self._guides, tokens, running, strict=True):
            if runs:
                guide.add(token)
