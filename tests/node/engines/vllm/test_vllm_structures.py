"""A real vLLM keeps a text to its structure, beside others that have none, and through a commit."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from structures_kit import KINDS, check_begun, check_kind, check_left, check_refused, sampling_by, text_of, tokenizer_of

from node.engines.base import Prompt
from node.engines.structures import Structure
from scenarios.engines.engine_bench import WITHIN_S
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tokenizer(untied: Path) -> Any:
    return tokenizer_of(untied)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_its_structure(one: Any, tokenizer: Any, kind: str):
    check_kind(one, tokenizer, kind)


def test_any_json_object(one: Any, tokenizer: Any):
    """Biases for the signs that end strings and objects: a random model writes without end."""
    ends = tuple(sorted((tokenizer.token_to_id(sign), 8.0) for sign in '"}]'))
    sampling = sampling_by(Structure(json_object=True), 400, logit_bias=ends)
    for completion in one.generate([Prompt((5 + i, 6, 7), i) for i in range(3)], sampling):
        assert isinstance(json.loads(text_of(tokenizer, completion)), dict)


def test_log_probabilities_are_of_what_the_structure_leaves(one: Any):
    check_left(one)


def test_a_text_that_another_engine_began_is_continued(one: Any, tokenizer: Any):
    check_begun(one, tokenizer)


@pytest.mark.parametrize("structure", [Structure(regex="("), Structure(json={"type": "no such type"})])
def test_a_structure_that_is_none_is_refused_alone(one: Any, structure: Structure):
    check_refused(one, structure)


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
