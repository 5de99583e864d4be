"""A real SGLang keeps a text to its structure, beside others that have none."""

from pathlib import Path
from typing import Any

import pytest
from structures_kit import KINDS, check_begun, check_kind, check_left, check_refused, sampling_by, text_of, tokenizer_of

from node.engines.base import Prompt, SamplingParams
from node.engines.structures import Structure

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return tokenizer_of(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_its_structure(one: Any, tokenizer: Any, kind: str):
    beside = one.begin([Prompt((8, 9), 1)], SamplingParams(40, seed=3))
    check_kind(one, tokenizer, kind)
    assert len(beside.result(300.0)[0].token_ids) == 40


def test_log_probabilities_are_of_what_the_structure_leaves(one: Any):
    check_left(one)


def test_a_greedy_text_has_its_structure_too(one: Any, tokenizer: Any):
    (completion,) = one.generate([Prompt((5, 6, 7))], sampling_by(Structure(regex="ab{2,5}c"), temperature=0.0))
    assert text_of(tokenizer, completion)[:3] == "abb"


def test_a_text_that_another_engine_began_is_continued(one: Any, tokenizer: Any):
    check_begun(one, tokenizer)


@pytest.mark.parametrize("structure", [Structure(regex="("), Structure(json={"type": "no such type"})])
def test_a_structure_that_is_none_is_refused_alone(one: Any, structure: Structure):
    check_refused(one, structure)
