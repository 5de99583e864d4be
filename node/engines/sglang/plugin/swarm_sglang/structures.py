"""Keeps a request's text to its structure, by the code that the transformers engine does it with (`swarm_vllm.guide`).

SGLang's own grammars are not used: they begin with the first drawn token, and nothing could continue a text that
another node began.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# SGLang is installed in another environment.

import json
from pathlib import Path
from typing import Any

import torch
from swarm_vllm.guide import Guide, Vocabulary
from swarm_vllm.messages import Options

__all__ = ["guided", "leave"]

_MOST_KEPT = 4
"""Vocabularies, each for another set of end tokens. One of 150,000 tokens takes half a second to make."""
_vocabularies: dict[tuple[int, ...], Vocabulary] = {}


class _Guided:
    """A request's guide, and how many of its drawn tokens the guide has."""

    def __init__(self, guide: Guide) -> None:
        self.guide, self.taken = guide, 0


def guided(request: Any, options: Options, config: Any) -> _Guided:
    """The guide of a request that arrives. Raises `ValueError` for a structure that cannot be, or was begun wrongly."""
    structure = json.loads(options.structure)
    begun = int(structure.pop("begun", 0))
    ends = tuple(sorted(token for token in request.sampling_params.stop_token_ids or () if token < config.vocab_size))
    if ends not in _vocabularies:
        if len(_vocabularies) >= _MOST_KEPT:
            _vocabularies.pop(next(iter(_vocabularies)))
        _vocabularies[ends] = Vocabulary(Path(config.model_path) / "tokenizer.json", config.vocab_size, ends)
    guide = Guide(_vocabularies[ends], structure)
    guide.begin(list(request.origin_input_ids)[-begun:] if begun else [])
    return _Guided(guide)


def leave(row: torch.Tensor, request: Any) -> None:
    """Put -inf in the row, (vocabulary,), for what the request must not draw next."""
    found = request.swarm_guide
    drawn = list(request.output_ids)
    for token in drawn[found.taken :]:
        found.guide.add(token)
    found.taken = len(drawn)
    allowed = torch.from_numpy(found.guide.allowed()).to(row.device)
    row[: len(allowed)].masked_fill_(~allowed, -torch.inf)
    row[len(allowed) :] = -torch.inf
