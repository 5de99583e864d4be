"""What every engine that keeps texts to structures does, asked of a live one."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from node.engines.base import OPTIONS, STRUCTURES, Completion, EngineError, Prompt, SamplingOptions, SamplingParams
from node.engines.base import needs as needed
from node.engines.structures import Structure, encode_structure
from node.engines.top_logprobs import read_top

END = 2
"""The tokenizer's end token."""
FIELDS = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["a", "b"], "additionalProperties": False}


def tokenizer_of(folder: Path) -> Any:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def sampling_by(structure: Structure, tokens: int = 200, temperature: float = 1.0, **more: Any) -> SamplingParams:
    options = SamplingOptions(structure=encode_structure(structure), **more)
    return SamplingParams(tokens, temperature=temperature, stop_tokens=(END,), options=options)


def text_of(tokenizer: Any, completion: Completion) -> str:
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == END
    return tokenizer.decode(list(completion.token_ids[:-1]), skip_special_tokens=False)


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    return sorted(found) == ["a", "b"] and 0 <= found["a"] <= 99 and found["b"] in ("x", "y")


KINDS: dict[str, tuple[Structure, Callable[[str], Any]]] = {
    "json": (Structure(json=SCHEMA), fits_schema),
    "regex": (Structure(regex="ab{2,5}c"), lambda text: re.fullmatch("ab{2,5}c", text)),
    "grammar": (Structure(grammar='root ::= "a" ("b" | "c") "d"\n'), lambda text: re.fullmatch("a[bc]d", text)),
    "choice": (Structure(choice=("yes", "no", 'a "b"')), lambda text: text in ("yes", "no", 'a "b"')),
}


def check_kind(one: Any, tokenizer: Any, kind: str) -> None:
    """A text has its structure."""
    structure, fits = KINDS[kind]
    sampling = sampling_by(structure)
    assert needed(sampling) == {OPTIONS, STRUCTURES}
    assert STRUCTURES in one.engine.abilities
    for completion in one.generate([Prompt((5 + i, 6, 7), i) for i in range(4)], sampling):
        assert fits(text_of(tokenizer, completion))


def check_begun(one: Any, tokenizer: Any) -> None:
    """A text that another engine began is continued, and refused where none begins so."""
    begun = tokenizer.encode('{"a":').ids
    (completion,) = one.generate([Prompt((5, 6, 7, *begun))], sampling_by(Structure(json=SCHEMA, begun=len(begun))))
    rest = text_of(tokenizer, completion)
    assert not rest.lstrip().startswith("{")
    assert fits_schema('{"a":' + rest)
    with pytest.raises(EngineError):
        one.generate([Prompt((5, 6, 7, *begun))], sampling_by(Structure(regex="x+", begun=len(begun))))


def check_refused(one: Any, structure: Structure) -> None:
    """What is no structure is refused alone."""
    with pytest.raises(EngineError):
        one.generate([Prompt((5, 6, 7))], sampling_by(structure))
    assert one.engine.poisoned is None
    assert len(one.generate([Prompt((5, 6, 7))], SamplingParams(4))[0].token_ids) == 4


def check_left(one: Any) -> None:
    """Log-probabilities are of what the structure leaves."""
    (completion,) = one.generate([Prompt((5, 6, 7))], sampling_by(Structure(choice=("a", "b")), top_logprobs=5))
    first, end = read_top(completion.top, 5)
    assert len(first) == 2, "the two texts"
    assert sum(math.exp(logprob) for _, logprob in first) == pytest.approx(1.0, abs=1e-3)
    assert dict(first)[completion.token_ids[0]] == pytest.approx(completion.logprobs[0], abs=1e-5)
    assert (end, completion.logprobs[1]) == ([(END, pytest.approx(0.0, abs=1e-5))], pytest.approx(0.0, abs=1e-5))
