"""A real vLLM keeps a text to its structure, beside others that have none, and through a commit."""

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from node.engines.base import (
    OPTIONS,
    STRUCTURES,
    Completion,
    EngineError,
    Prompt,
    SamplingOptions,
    SamplingParams,
    needs,
)
from node.engines.structures import Structure, encode_structure
from node.engines.top_logprobs import read_top
from scenarios.engines.engine_bench import WITHIN_S
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

END = 2
"""The tokenizer's end token."""
FIELDS = {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}}
SCHEMA = {"type": "object", "properties": FIELDS, "required": ["a", "b"], "additionalProperties": False}


@pytest.fixture(scope="module")
def tokenizer(untied: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(untied / "tokenizer.json"))


def sampling_by(structure: Structure, tokens: int = 200, **more: Any) -> SamplingParams:
    options = SamplingOptions(structure=encode_structure(structure), **more)
    return SamplingParams(tokens, temperature=1.0, stop_tokens=(END,), options=options)


def text_of(tokenizer: Any, completion: Completion) -> str:
    assert completion.finish_reason == "stop"
    assert completion.token_ids[-1] == END
    return tokenizer.decode(list(completion.token_ids[:-1]), skip_special_tokens=False)


def fits_schema(text: str) -> bool:
    found = json.loads(text)
    return sorted(found) == ["a", "b"] and 0 <= found["a"] <= 99 and found["b"] in ("x", "y")


@pytest.mark.parametrize(
    ("structure", "fits"),
    [
        (Structure(json=SCHEMA), fits_schema),
        (Structure(regex="ab{2,5}c"), lambda text: re.fullmatch("ab{2,5}c", text)),
        (Structure(choice=("yes", "no", 'a "b"')), lambda text: text in ("yes", "no", 'a "b"')),
    ],
    ids=["json", "regex", "choice"],
)
def test_a_text_has_its_structure(one: Any, tokenizer: Any, structure: Structure, fits: Callable[[str], Any]):
    sampling = sampling_by(structure)
    assert needs(sampling) == {OPTIONS, STRUCTURES} <= one.engine.abilities
    for completion in one.generate([Prompt((5 + i, 6, 7), i) for i in range(4)], sampling):
        assert fits(text_of(tokenizer, completion))


def test_any_json_object(one: Any, tokenizer: Any):
    """Biases for the signs that end strings and objects: a random model writes without end."""
    ends = tuple(sorted((tokenizer.token_to_id(sign), 8.0) for sign in '"}]'))
    sampling = sampling_by(Structure(json_object=True), 400, logit_bias=ends)
    for completion in one.generate([Prompt((5 + i, 6, 7), i) for i in range(3)], sampling):
        assert isinstance(json.loads(text_of(tokenizer, completion)), dict)


def test_log_probabilities_are_of_what_the_structure_leaves(one: Any):
    (completion,) = one.generate([Prompt((5, 6, 7))], sampling_by(Structure(choice=("a", "b")), top_logprobs=5))
    first, end = read_top(completion.top, 5)
    assert len(first) == 2, "the two texts"
    assert sum(math.exp(logprob) for _, logprob in first) == pytest.approx(1.0, abs=1e-3)
    assert dict(first)[completion.token_ids[0]] == pytest.approx(completion.logprobs[0], abs=1e-5)
    assert (end, completion.logprobs[1]) == ([(END, pytest.approx(0.0, abs=1e-5))], pytest.approx(0.0, abs=1e-5))


def test_a_text_that_another_engine_began_is_continued(one: Any, tokenizer: Any):
    begun = tokenizer.encode('{"a":').ids
    (completion,) = one.generate([Prompt((5, 6, 7, *begun))], sampling_by(Structure(json=SCHEMA, begun=len(begun))))
    rest = text_of(tokenizer, completion)
    assert not rest.lstrip().startswith("{")
    assert fits_schema('{"a":' + rest)
    with pytest.raises(EngineError):
        one.generate([Prompt((5, 6, 7, *begun))], sampling_by(Structure(regex="x+", begun=len(begun))))


@pytest.mark.parametrize("structure", [Structure(regex="("), Structure(json={"type": "no such type"})])
def test_a_structure_that_is_none_is_refused_alone(one: Any, structure: Structure):
    with pytest.raises(EngineError):
        one.generate([Prompt((5, 6, 7))], sampling_by(structure))
    assert one.engine.poisoned is None
    assert len(one.generate([Prompt((5, 6, 7))], SamplingParams(4))[0].token_ids) == 4


def test_a_commit_in_the_middle_leaves_the_structure(one: Any, tokenizer: Any):
    for seed in range(5):
        flight = one.begin([Prompt((5, 6, 7))], sampling_by(Structure(regex="(ab){150}"), 400))
        time.sleep(0.2)
        one.update(step_of(one.replica, seed))
        (completion,) = flight.result(WITHIN_S)
        assert text_of(tokenizer, completion) == "ab" * 150
        if len(completion.spans) == 2:
            break
    versions = [span.version for span in completion.spans]
    assert versions == [(0, one.version - 1), (0, one.version)], "the commit came in the middle"
