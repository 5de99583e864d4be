"""Structures: how they are written, and what engines do with them."""

import sys
from pathlib import Path

import pytest
from test_transformers import engine_on

from node.engines.base import (
    ABILITIES,
    OPTIONS,
    STRUCTURES,
    Prompt,
    SamplingOptions,
    SamplingParams,
    needs,
    scoring_needs,
)
from node.engines.structures import Structure, begun_by, encode_structure, read_structure
from node.engines.transformers import TransformersEngine


@pytest.mark.parametrize(
    "structure",
    [
        Structure(json={"type": "object", "properties": {"a": {"const": "ü"}}}),
        Structure(json={}),
        Structure(json_object=True),
        Structure(regex="a+"),
        Structure(choice=("a", "b")),
        Structure(regex="a+", begun=3),
    ],
)
def test_what_is_written_is_read_again(structure: Structure):
    assert read_structure(encode_structure(structure)) == structure


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"regex":"a","begun":-1}',
        '{"regex":"a","choice":["b"]}',
        '{"json":[]}',
        '{"regex":""}',
        '{"xml":1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_structure_is_refused(text: str):
    with pytest.raises(ValueError, match="structure"):
        read_structure(text)


def test_a_structure_may_be_only_so_long():
    with pytest.raises(ValueError, match="at most 65504"):
        encode_structure(Structure(choice=tuple(str(i) * 100 for i in range(1000))))
    longest = encode_structure(Structure(regex="a" * (65_504 - len('{"regex":""}'))))
    assert len(longest) == 65_504
    assert read_structure(begun_by(longest, 1 << 16)).begun == 1 << 16, "there is room for what was drawn"
    with pytest.raises(ValueError, match="at most 65536"):
        SamplingOptions(structure="x" * 70_000)


def test_samples_with_a_structure_need_the_ability_and_are_not_judged():
    sampling = SamplingParams(4, options=SamplingOptions(structure=encode_structure(Structure(json_object=True))))
    assert needs(sampling) == {OPTIONS, STRUCTURES}
    assert not scoring_needs(sampling) <= ABILITIES


def test_an_engine_that_cannot_follow_a_structure_says_why(tied_folder: Path, monkeypatch: pytest.MonkeyPatch):
    engine = engine_on(tied_folder)
    wanted = SamplingOptions(structure=encode_structure(Structure(regex="a")))
    with pytest.raises(ValueError, match="not scored"):
        engine.score((1,), (2,), SamplingParams(1, options=wanted))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr("node.engines.constraints.lacking", list)
    with pytest.raises(ValueError, match="llguidance"):
        engine.generate([Prompt((1, 2))], SamplingParams(3, stop_tokens=(5,), options=wanted))
    assert STRUCTURES not in TransformersEngine(device="cpu").abilities
