"""The formats of a seed: right after each version, however the trainer sent it, and after a return to an older one."""

import numpy as np
import pytest
from seed_kit import FakeSeed

from codec import BlockDelta, Layout, Replica, StagedBlock, TensorSpec, state_root
from codec.bits import Bits
from codec.chunk import CODER_RAW, CODER_RICE
from codec.formats.quantise import quantise
from codec.formats.share import FormatShare
from codec.formats.spec import FORMATS, format_tensors, quantised
from codec.part_view import PartView
from codec.parts import BASE, Part, extended
from codec.staging import block_hash, encode_changes
from node.coordinator import format_parts
from node.coordinator.format_parts import CLASSES, FormatParts, compute_formats
from node.coordinator.publisher import Publisher
from node.trainers.messages import VersionRef

NAMES = ("int4-group-e8", "fp8-block")
SMALL = Layout(
    (
        TensorSpec("a.embed_tokens.weight", "BF16", (64, 64)),
        TensorSpec("b.up_proj.weight", "BF16", (1100, 1003)),
        TensorSpec("c.down_proj.weight", "BF16", (200, 300)),
        TensorSpec("d.norm.weight", "BF16", (300,)),
    )
)
WHOLE = extended(SMALL, formats=[tensor for name in NAMES for tensor in format_tensors(SMALL, FORMATS[name])])


@pytest.fixture
def seed() -> FakeSeed:
    replica, rng = Replica.create(WHOLE), np.random.default_rng(0)
    for block in range(SMALL.n_blocks):
        values = (rng.standard_normal(WHOLE.block(block).count) * 0.02).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16)
        replica.write_block(block, bits.tobytes(), block_hash(bits))
    compute_formats(replica)
    return FakeSeed(replica)


def is_right(replica: Replica) -> bool:
    """Whether the formats are those of the base, tensor by tensor, and every hash is that of its bits."""
    for name in NAMES:
        for tensor in quantised(SMALL, FORMATS[name]):
            band = quantise(replica.bits(tensor.base.name), tensor.matrix, tensor.form)
            codes, scales = replica.bits(tensor.codes.name), replica.bits(tensor.scales.name)
            if (codes.tobytes(), scales.tobytes()) != (band.codes.tobytes(), band.scales.tobytes()):
                return False
    return replica.rehash() == []


def change(bits: Bits, number: int) -> Bits:
    rng = np.random.default_rng(number)
    places = rng.choice(bits.size, bits.size // 50, replace=False)
    new = bits.copy()
    new[places] ^= rng.choice(np.array([1, 2, 0x80, 0x8000], np.uint16), places.size)
    return new


def step(view: PartView, number: int, how: str) -> tuple[list[BlockDelta], list[StagedBlock], bytes]:
    """A step of the base: its deltas, what is listed of them (all, none, or half), and its root."""
    deltas, known, hashes = [], [], view.hashes.copy()
    for block in range(view.layout.n_blocks):
        old, dtype = view.block(block), view.layout.block(block).dtype
        new = change(old, number + block)
        encoded = encode_changes(block, old, new, dtype, CODER_RAW if how == "raw" else CODER_RICE)
        assert encoded is not None
        deltas.append(encoded.delta)
        hashes[block] = np.frombuffer(encoded.delta.new_hash, np.uint8)
        if encoded.positions is not None and (how == "listed" or (how == "half" and block % 2)):
            old_hash = view.hashes[block].tobytes()
            bits = new[encoded.positions]
            known.append(StagedBlock(block, encoded.positions, bits, old_hash, encoded.delta.new_hash))
    return deltas, known, state_root(view.layout.hash, hashes)


async def publish(publisher: Publisher, number: int, how: str) -> frozenset[Part]:
    await publisher.begin()
    deltas, known, root = step(publisher.view(BASE), number, how)
    await publisher.add(deltas, known)
    return (await publisher.end(1, root)).parts


def test_a_new_swarm_has_its_formats(seed: FakeSeed) -> None:
    assert is_right(seed.replica)


@pytest.mark.parametrize("how", ["listed", "coded", "half", "raw"])
async def test_formats_follow_the_base(seed: FakeSeed, how: str) -> None:
    publisher = Publisher(seed)
    for number in (10, 20, 30):
        parts = await publish(publisher, number, how)
        assert {str(part) for part in parts} == {"base", *(f"format/{name}" for name in NAMES)}
        assert is_right(seed.replica)
        assert is_right(seed.receiver)
        assert seed.receiver.root == seed.replica.root == seed.manifests[-1].root


async def test_lists_beyond_the_budget_are_decoded_again(seed: FakeSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(format_parts, "_KEPT_BYTES", 1 << 16)
    monkeypatch.setattr(format_parts, "_DECODED", 1)
    await publish(Publisher(seed), 10, "listed")
    assert is_right(seed.replica)
    assert is_right(seed.receiver)


async def test_a_return_to_an_older_version_brings_its_formats_back(seed: FakeSeed) -> None:
    publisher, before = Publisher(seed), seed.replica.root
    await publish(publisher, 10, "listed")
    await publisher.go_back(VersionRef(root=before))
    assert seed.replica.root == before == seed.receiver.root
    assert is_right(seed.receiver)


def test_blocks_of_one_class_are_held_by_the_same_members() -> None:
    found = FormatParts(WHOLE)
    held = [FormatShare(name).blocks(WHOLE) for name in NAMES]
    by_class: dict[int, set[tuple[bool, ...]]] = {}
    for block in range(SMALL.n_blocks):
        holders = tuple(bool(blocks[block]) for blocks in held)
        assert found.is_source(block) == (not all(holders))
        by_class.setdefault(found.class_of(block), set()).add(holders)
    assert set(by_class) <= set(range(CLASSES))
    # fp8 holders take the embedding, no holder the matrices, and both the norm.
    assert all(len(holders) == 1 for holders in by_class.values())
    assert set.union(*by_class.values()) == {(False, False), (False, True), (True, True)}


async def test_no_chunk_has_blocks_of_two_parts(seed: FakeSeed) -> None:
    await publish(Publisher(seed), 10, "listed")
    by_chunk: dict[object, set[str]] = {}
    for key, block in seed.payloads:
        name = WHOLE.block(block).name
        by_chunk.setdefault(key, set()).add(name.split("/")[1] if name.startswith("~") else "base")
    assert all(len(parts) == 1 for parts in by_chunk.values())
