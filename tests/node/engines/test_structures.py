"""Structures: how they are written, and what engines do with them."""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

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


@pytest.fixture
def byte_texts(tmp_path: Path) -> Path:
    """The file of a tokenizer with a token for each byte, and an end token, 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: i for i, sign in enumerate(signs)} | {"<end>": 256}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def nested(depth: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}


COSTLY = {
    "repetitions": Structure(regex="(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    "alternatives": Structure(regex="(a|aa|aaa|[a-z]*b)*" * 200),
    "sets": Structure(regex=".*" + ".?" * 2000 + "x{500}.*"),
    "long": Structure(regex="(x+x+)+y" * 4000),
    "choices": Structure(choice=tuple("a" * i for i in range(1, 300))),
    "deep": Structure(json=nested(60)),
    "itself": Structure(json={"$ref": "#"}),
    "all of": Structure(json={"allOf": [{"anyOf": [{"pattern": f".*{i}.*{j}"} for i in range(9)]} for j in range(9)]}),
    "lengths": Structure(
        json={"type": "array", "minItems": 1 << 30, "items": {"type": "string", "maxLength": 1 << 30}}
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_a_costly_structure_costs_little(byte_texts: Path, name: str):
    pytest.importorskip("llguidance")
    torch = pytest.importorskip("torch")
    from node.engines.constraints import Constraints

    options = SamplingOptions(structure=encode_structure(COSTLY[name]))
    sampling = SamplingParams(64, stop_tokens=(256,), options=options)
    began = time.thread_time()
    with contextlib.suppress(ValueError):  # it is refused
        constraints = Constraints(byte_texts, 257, sampling, [(1,)])
        for _ in range(20):
            left = constraints.masked(torch.zeros(1, 257), [True])[0].isfinite().nonzero()
            token = int(left[0, 0])  # there is one
            if token == 256:
                break
            constraints.add([token], [True])
    assert time.thread_time() - began < 2.0


def test_a_text_begins_in_the_prompt(byte_texts: Path):
    pytest.importorskip("llguidance")
    torch = pytest.importorskip("torch")
    from node.engines.constraints import Constraints

    def constraints(structure: Structure) -> Constraints:
        options = SamplingOptions(structure=encode_structure(structure))
        return Constraints(byte_texts, 257, SamplingParams(64, stop_tokens=(256,), options=options), [prompt])

    from tokenizers import Tokenizer

    prompt = Tokenizer.from_file(str(byte_texts)).encode("say: ab").ids
    masked = constraints(Structure(regex="abc", begun=2)).masked(torch.zeros(1, 257), [True])
    assert masked[0].isfinite().nonzero().tolist() == [Tokenizer.from_file(str(byte_texts)).encode("c").ids]
    with pytest.raises(ValueError, match="no such text begins"):
        constraints(Structure(regex="abc", begun=3))
