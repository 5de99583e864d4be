"""Layouts: blocks are computed, the encoding is unique, and invalid tables are refused."""

import time
from dataclasses import replace

import pytest
from codec_kit import LAYOUT
from hypothesis import given
from hypothesis import strategies as st

from codec.bits import DTYPES
from codec.errors import PeerError, SwarmError
from codec.layout import BLOCK_ELEMENTS, FileSpec, Layout, TensorSpec

FILES = (FileSpec("config.json", 2, bytes(32)), FileSpec("tokenizer.json", 0, bytes(32)))


def test_blocks_cover_every_element_once() -> None:
    seen: dict[str, int] = {}
    end = 0
    for block in range(LAYOUT.n_blocks):
        spec = LAYOUT.block(block)
        tensor = LAYOUT.tensors[spec.tensor]
        assert spec.name == tensor.name
        assert spec.start == seen.get(spec.name, 0)
        assert 0 < spec.count <= BLOCK_ELEMENTS
        assert spec.nbytes == spec.count * tensor.type.itemsize
        assert spec.offset == LAYOUT.offset(spec.name) + spec.start * tensor.type.itemsize >= end
        assert block in LAYOUT.blocks_of(spec.name)
        seen[spec.name] = spec.start + spec.count
        end = spec.offset + spec.nbytes
    assert seen == {tensor.name: tensor.elements for tensor in LAYOUT.tensors if tensor.elements}
    assert end <= LAYOUT.nbytes
    assert LAYOUT.full_bytes == sum(tensor.nbytes for tensor in LAYOUT.tensors)


def test_tied_names_are_one_tensor() -> None:
    assert LAYOUT.tensor("lm_head.weight") is LAYOUT.tensor("model.embed_tokens.weight")
    assert LAYOUT.blocks_of("lm_head.weight") == LAYOUT.blocks_of("model.embed_tokens.weight")


def test_empty_tensors_have_no_blocks_and_scalars_one() -> None:
    assert len(LAYOUT.blocks_of("c.empty")) == 0
    assert LAYOUT.block(LAYOUT.blocks_of("d.scalar")[0]).count == 1


@pytest.mark.parametrize("block", [-1, LAYOUT.n_blocks])
def test_an_unknown_block_is_an_error(block: int) -> None:
    with pytest.raises(IndexError):
        LAYOUT.block(block)


def test_a_model_of_10_to_the_11_elements_costs_no_time_per_element() -> None:
    start = time.perf_counter()
    layout = Layout((TensorSpec("a", "BF16", (3,)), TensorSpec("huge", "F32", (10**6, 10**5 + 7))))
    last = layout.block(layout.n_blocks - 1)
    assert last.start + last.count == 10**11 + 7 * 10**6
    assert last.offset == 64 + 4 * last.start
    assert Layout.from_bytes(layout.to_bytes()) == layout
    assert time.perf_counter() - start < 0.1


names = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=20)
tensors = st.dictionaries(
    names, st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 5000), max_size=3)), max_size=8
).map(lambda table: tuple(TensorSpec(name, dtype, tuple(shape)) for name, (dtype, shape) in sorted(table.items())))


@given(tensors)
def test_layouts_round_trip_with_the_same_hash(specs: tuple[TensorSpec, ...]) -> None:
    layout = Layout(specs, FILES)
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert again.hash == layout.hash


@given(st.integers(0), st.binary(max_size=3))
def test_altered_bytes_are_another_layout_or_refused(at: int, by: bytes) -> None:
    data = replace(LAYOUT, files=FILES).to_bytes()
    at %= len(data) + 1
    altered = data[:at] + by + data[at + len(by) :]
    try:
        layout = Layout.from_bytes(altered)
    except SwarmError:
        return
    assert layout.to_bytes() == altered  # a layout has one encoding


T = TensorSpec
BAD = {
    "not sorted": (T("b", "BF16", ()), T("a", "BF16", ())),
    "twice": (T("a", "BF16", ()), T("a", "F32", ())),
    "unknown dtype": (T("a", "F4", ()),),
    "too large": (T("a", "BF16", (1 << 50,)),),
    "negative": (T("a", "BF16", (-1,)),),
    "too many dimensions": (T("a", "BF16", (1,) * 17),),
    "empty name": (T("", "BF16", ()),),
    "long name": (T("a" * 513, "BF16", ()),),
    "control characters": (T("a\nb", "BF16", ()),),
    "alias taken": (T("a", "BF16", (), ("b",)), T("b", "BF16", ())),
    "alias twice": (T("a", "BF16", (), ("b", "b")),),
    "aliases not sorted": (T("a", "BF16", (), ("c", "b")),),
}


@pytest.mark.parametrize("specs", BAD.values(), ids=BAD)
def test_impossible_tables_are_refused(specs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(PeerError, match="layout"):
        Layout(specs)


@pytest.mark.parametrize("name", ["", ".hidden", "..", "a/b", "a\\b", "a\0b", "/etc/passwd"])
def test_file_names_stay_in_their_folder(name: str) -> None:
    with pytest.raises(PeerError, match=r"layout\.file"):
        Layout((), (FileSpec(name, 1, bytes(32)),))


@pytest.mark.parametrize("cut", range(0, 60, 7))
def test_a_truncated_layout_is_refused(cut: int) -> None:
    with pytest.raises(PeerError):
        Layout.from_bytes(LAYOUT.to_bytes()[: -1 - cut])
