"""The parts of a layout: their tensors, blocks and roots; and which layouts can have them."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.adapter import AdapterSlots
from codec.errors import PeerError, UsageError
from codec.layout import FileSpec, Layout, TensorSpec
from codec.manifest import state_root
from codec.parts import (
    BASE,
    DRAFT_FILE,
    Kind,
    Part,
    base_layout,
    changed_parts,
    draft_files,
    draft_layout,
    extended,
    part_classes,
    part_layout,
    part_of,
    part_root,
    parts,
    policy_part,
)
from codec.shards import Shard

FILES = (FileSpec("config.json", 2, b"c" * 32),)
MODEL = Layout(
    (
        TensorSpec("a.proj.weight", "BF16", (1100, 1003)),
        TensorSpec("b.empty", "BF16", (0, 5)),
        TensorSpec("model.embed_tokens.weight", "BF16", (70, 64), ("lm_head.weight",)),
        TensorSpec("z.proj.weight", "F32", (64, 32)),
    ),
    FILES,
)
DRAFT = Layout((TensorSpec("d.weight", "BF16", (8, 8), ("e.weight",)),), (FileSpec("config.json", 3, b"d" * 32),))
FORMAT = (
    TensorSpec("~format/int4/a.proj.weight/codes", "U8", (5,)),
    TensorSpec("~format/int4/a.proj.weight/scales", "U8", (3,)),
)


def whole(slots: int = 3, rank: int = 4) -> Layout:
    return extended(MODEL, AdapterSlots.reserve(MODEL, slots, rank), DRAFT, FORMAT)


def hashes_of(layout: Layout, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (layout.n_blocks, 32), np.uint8)


def test_a_layout_without_parts_is_its_own_base() -> None:
    assert extended(MODEL) is MODEL
    assert base_layout(MODEL) is MODEL
    assert [(found.part, found.blocks) for found in parts(MODEL)] == [(BASE, range(MODEL.n_blocks))]
    hashes = hashes_of(MODEL)
    assert part_root(MODEL, hashes, BASE) == state_root(MODEL.hash, hashes)
    assert part_classes(MODEL) is None
    assert part_classes(MODEL, [3, 1, 2, 1]) == [3, 1, 2, 1]


@given(st.integers(1, 64), st.integers(1, 64), st.booleans(), st.booleans())
def test_the_parts_are_the_layout_and_the_base_is_its_prefix(slots: int, rank: int, draft: bool, stored: bool) -> None:
    reserved = AdapterSlots.reserve(MODEL, slots, rank)
    layout = extended(MODEL, reserved, DRAFT if draft else None, FORMAT if stored else ())
    found = parts(layout)
    expected = [BASE, *[Part(Kind.DRAFT)] * draft, *map(Part.adapter, range(slots))]
    expected += [Part(Kind.FORMAT, "int4")] * stored
    assert [one.part for one in found] == expected
    assert [number for one in found for number in one.blocks] == list(range(layout.n_blocks))
    assert [number for one in found for number in one.tensors] == list(range(len(layout.tensors)))
    assert base_layout(layout) == MODEL
    assert AdapterSlots.of(layout) == reserved
    for tensor in MODEL.tensors:
        assert layout.offset(tensor.name) == MODEL.offset(tensor.name)
        assert layout.blocks_of(tensor.name) == MODEL.blocks_of(tensor.name)
    assert Layout.from_bytes(layout.to_bytes()) == layout


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_the_root_of_a_part_depends_on_its_own_blocks_only(slots: int, seed: int) -> None:
    layout = whole(slots)
    hashes = hashes_of(layout, seed)
    roots = {found.part: part_root(layout, hashes, found.part) for found in parts(layout)}
    assert len(set(roots.values())) == len(roots)
    assert roots[BASE] == state_root(MODEL.hash, hashes[: MODEL.n_blocks])
    for found in parts(layout):
        changed = hashes.copy()
        changed[found.blocks.start] ^= 1
        now = {other: part_root(layout, changed, other) for other in roots}
        assert {part for part in roots if now[part] != roots[part]} == {found.part}


def test_equal_slots_have_different_roots() -> None:
    layout = whole()
    zeros = np.zeros((layout.n_blocks, 32), np.uint8)
    assert part_root(layout, zeros, Part.adapter(0)) != part_root(layout, zeros, Part.adapter(1))


def test_a_part_is_a_layout_of_its_own() -> None:
    layout = whole()
    slot = part_layout(layout, Part.adapter(1))
    assert [tensor.name for tensor in slot.layout.tensors] == ["~adapter/01/config", "~adapter/01/weights"]
    assert slot.first == layout.blocks_of("~adapter/01/config").start
    assert slot.offset == layout.offset("~adapter/01/config")
    assert len(slot.blocks) == slot.layout.n_blocks
    for tensor in slot.layout.tensors:
        assert slot.offset + slot.layout.offset(tensor.name) == layout.offset(tensor.name)
    draft = part_layout(layout, Part(Kind.DRAFT)).layout
    assert [(t.name, t.aliases) for t in draft.tensors] == [("~_draft/d.weight", ("~_draft/e.weight",))]
    assert [file.name for file in draft.files] == [DRAFT_FILE + "config.json"]
    with pytest.raises(PeerError, match="no adapter/07"):
        part_layout(layout, Part.adapter(7))


def test_the_base_with_its_draft_is_a_prefix_of_the_layout() -> None:
    layout = whole()
    policy = policy_part(layout)
    assert policy.layout == extended(MODEL, draft=DRAFT)
    assert (policy.part, policy.first, policy.offset) == (BASE, 0, 0)
    for tensor in policy.layout.tensors:
        assert policy.layout.offset(tensor.name) == layout.offset(tensor.name)
        assert policy.layout.blocks_of(tensor.name) == layout.blocks_of(tensor.name)
    assert policy_part(policy.layout).layout is policy.layout
    assert policy_part(extended(MODEL, AdapterSlots.reserve(MODEL, 2, 4))).layout == MODEL
    assert policy_part(MODEL).layout is MODEL


def test_a_draft_has_the_layout_of_its_own_checkpoint() -> None:
    assert draft_layout(whole()) == DRAFT
    assert draft_layout(MODEL) is None
    assert draft_files({"config.json": b"{}"}) == {DRAFT_FILE + "config.json": b"{}"}


def test_no_class_has_blocks_of_two_parts() -> None:
    layout = whole()
    for base_classes in (None, [7, 7, 1, 3]):
        classes = part_classes(layout, base_classes)
        assert classes is not None
        assert len(classes) == layout.n_blocks
        owner = {number: found.part for found in parts(layout) for number in found.blocks}
        by_class: dict[int, set[Part]] = {}
        for number, one in enumerate(classes):
            by_class.setdefault(one, set()).add(owner[number])
        assert all(len(owners) == 1 for owners in by_class.values())
        assert list(classes[: MODEL.n_blocks]) == (base_classes or [0] * MODEL.n_blocks)


def test_every_shard_has_all_parts_beyond_the_base() -> None:
    """Experts of the base are dealt over ranks, those of a draft or of a format are not."""
    experts = tuple(TensorSpec(f"mlp.experts.{i}.w1.weight", "BF16", (64, 64)) for i in range(8))
    base, draft = Layout(experts), Layout((TensorSpec("mlp.experts.9.w1.weight", "BF16", (64, 64)),))
    formats = (TensorSpec("~format/int4/mlp.experts.0.w1.weight/codes", "U8", (9,)),)
    layout = extended(base, AdapterSlots.reserve(base, 2, 4), draft, formats)
    for shard in (Shard(4, (0,)), Shard(4, (1, 3))):
        held = shard.blocks(layout)
        assert list(held[: base.n_blocks]) == list(shard.blocks(base))
        assert held[base.n_blocks :].all()


@given(st.sets(st.integers(0, 30)))
def test_changed_parts_are_those_of_the_blocks(blocks: set[int]) -> None:
    layout = whole()
    ranges = parts(layout)
    if any(block >= layout.n_blocks for block in blocks):
        with pytest.raises(PeerError, match="block"):
            changed_parts(ranges, blocks)
        return
    owner = {number: found.part for found in ranges for number in found.blocks}
    assert changed_parts(ranges, blocks) == {owner[block] for block in blocks}


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.layers.0.weight", BASE),
        ("~adapter/07/config", Part.adapter(7)),
        ("~adapter/63/weights", Part.adapter(63)),
        ("~adapter/64/weights", BASE),
        ("~adapter/7/config", BASE),
        ("~adapter/07/other", BASE),
        ("~adapter/०७/config", BASE),
        ("~_draft/x", Part(Kind.DRAFT)),
        ("~_draft/", BASE),
        ("~format/int4-group-e8/a/b.weight/codes", Part(Kind.FORMAT, "int4-group-e8")),
        ("~format//a/codes", BASE),
        ("~other", BASE),
    ],
)
def test_a_name_says_its_part(name: str, part: Part) -> None:
    assert part_of(name) == part


@given(st.integers(0, 63), st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True))
def test_a_part_is_read_back_from_its_text(slot: int, name: str) -> None:
    for part in (BASE, Part(Kind.DRAFT), Part.adapter(slot), Part(Kind.FORMAT, name)):
        assert Part.parse(str(part)) == part


@given(st.text(max_size=90))
def test_any_text_is_a_part_or_refused(text: str) -> None:
    with contextlib.suppress(PeerError):
        assert str(Part.parse(text)) == text


@pytest.mark.parametrize("slot", [-1, 64])
def test_there_are_64_slots(slot: int) -> None:
    with pytest.raises(UsageError, match="0 to 63"):
        Part.adapter(slot)


@pytest.mark.parametrize("name", ["~x", "~adapter/00/config", "über.weight", "\x7fx"])
def test_names_that_sort_after_the_mark_leave_no_room(name: str) -> None:
    if not name.isprintable():
        return
    with pytest.raises(UsageError, match="sort before '~'"):
        extended(Layout((*MODEL.tensors, TensorSpec(name, "U8", (1,)))), AdapterSlots.reserve(MODEL, 1, 1))
    alias = Layout((TensorSpec("a.weight", "BF16", (8, 8), (name,)),))
    with pytest.raises(UsageError, match="sort before '~'"):
        extended(alias, draft=DRAFT)


def test_too_long_names_of_a_draft_are_refused() -> None:
    draft = Layout((TensorSpec("d" * 512, "U8", (1,)),))
    with pytest.raises(UsageError, match="cannot have these parts"):
        extended(MODEL, draft=draft)


def test_parts_that_are_not_together_are_refused() -> None:
    layout = Layout(
        (
            TensorSpec("~adapter/00/config", "U8", (1,)),
            TensorSpec("~b", "U8", (1,)),
        )
    )
    with pytest.raises(PeerError, match="does not follow"):
        parts(layout)
