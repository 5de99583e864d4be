"""The publisher with a layout that has parts: a trainer works on one part, and all other blocks stay as they are."""

import numpy as np
import pytest
from seed_kit import FakeSeed, random_replica

from codec import BlockDelta, Layout, Replica, TensorSpec, open_header, state_root
from codec.adapter import AdapterSlots
from codec.errors import PeerError
from codec.parts import BASE, Part, base_layout, extended, part_root
from node.coordinator.publisher import Publisher
from node.trainers.messages import VersionRef

SMALL = Layout(tuple(TensorSpec(f"t{i}.weight", "BF16", (1 << 9, 1 << 9)) for i in range(4)))
PARTED = extended(SMALL, AdapterSlots.reserve(SMALL, 2, 4))
SLOT = Part.adapter(1)


def step(seed: FakeSeed, publisher: Publisher, part: Part, seed_of_bits: int = 1) -> tuple[list[BlockDelta], bytes]:
    """Deltas, with the part's own numbers, that change every block of a part; and the part's root after them."""
    view = publisher.view(part)
    hashes, deltas = view.hashes.copy(), []
    rng = np.random.default_rng(seed_of_bits)
    for block in range(view.layout.n_blocks):
        old = view.block(block)
        new = old.copy()
        new[:: 1 + len(new) // 7] = rng.integers(0, 255, len(new[:: 1 + len(new) // 7]), old.dtype)
        encoded = view.encode_changes(block, new)
        assert encoded is not None
        hashes[block] = np.frombuffer(encoded.delta.new_hash, np.uint8)
        deltas.append(encoded.delta)
    return deltas, state_root(view.layout.hash, hashes)


@pytest.fixture
def seed() -> FakeSeed:
    return FakeSeed(random_replica(PARTED))


def part_roots(replica: Replica) -> dict[Part, bytes]:
    return {part: part_root(replica.layout, replica.hashes, part) for part in (BASE, Part.adapter(0), SLOT)}


async def test_a_trainer_of_the_base_knows_nothing_of_other_parts(seed: FakeSeed) -> None:
    publisher = Publisher(seed)
    before = part_roots(seed.replica)
    assert publisher.blocks_of(BASE).layout == SMALL == base_layout(PARTED)
    await publisher.begin()
    deltas, root = step(seed, publisher, BASE)
    await publisher.add(deltas)
    assert len(publisher.hashes) == SMALL.n_blocks
    sealed = await publisher.end(1, root)
    assert (sealed.part_root, sealed.parts) == (root, {BASE})
    assert sealed.root == seed.replica.root == seed.receiver.root == seed.manifests[-1].root
    assert part_roots(seed.replica) == before | {BASE: root}
    assert seed.receiver.rehash() == []


async def test_a_trainer_of_a_slot_changes_only_that_slot(seed: FakeSeed) -> None:
    publisher = Publisher(seed)
    before = part_roots(seed.replica)
    await publisher.begin(part=SLOT)
    deltas, root = step(seed, publisher, SLOT)
    assert [delta.block for delta in deltas] == list(range(len(deltas)))
    with pytest.raises(PeerError, match=f"{len(deltas)} of {len(deltas)}"):
        await publisher.add([BlockDelta(len(deltas), 0, bytes(32), b"x")])
    await publisher.add(deltas)
    with pytest.raises(PeerError, match="0 came twice"):
        await publisher.add(deltas[:1])
    with pytest.raises(PeerError, match="do not add up"):
        await publisher.end(1, seed.replica.root)
    sealed = await publisher.end(1, root)
    assert sealed.parts == seed.sealed_parts[-1] == {SLOT}
    assert part_roots(seed.replica) == before | {SLOT: root}
    assert seed.receiver.root == seed.replica.root == sealed.root


async def test_blocks_beyond_the_base_are_refused(seed: FakeSeed) -> None:
    publisher = Publisher(seed)
    await publisher.begin()
    with pytest.raises(PeerError, match=f"{SMALL.n_blocks} of {SMALL.n_blocks}"):
        await publisher.add([BlockDelta(SMALL.n_blocks, 0, bytes(32), b"x")])


async def test_a_part_that_the_model_does_not_have_is_refused(seed: FakeSeed) -> None:
    publisher = Publisher(seed)
    with pytest.raises(PeerError, match="no adapter/02"):
        await publisher.begin(part=Part.adapter(2))
    assert not publisher.busy


async def test_the_published_part_counts_as_changed_even_without_changes(seed: FakeSeed) -> None:
    publisher = Publisher(seed)
    await publisher.begin(part=SLOT)
    sealed = await publisher.end(0, publisher.view(SLOT).root)
    assert sealed.parts == {SLOT}


async def test_no_chunk_has_blocks_of_two_parts(seed: FakeSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(seed)
    before = seed.replica.root
    for part in (BASE, SLOT):
        await publisher.begin(part=part)
        deltas, root = step(seed, publisher, part)
        await publisher.add(deltas)
        await publisher.end(1, root)
    chunks: list[list[int]] = []
    add_chunk = seed.add_chunk

    async def note(chunk, known=None):
        chunks.append([entry.block for entry in open_header(chunk.header, seed.key.public).blocks])
        await add_chunk(chunk, known)

    monkeypatch.setattr(seed, "add_chunk", note)
    returned = await publisher.go_back(VersionRef(before))
    assert returned.root == before == seed.receiver.root
    assert seed.sealed_parts[-1] == {BASE, SLOT}
    assert {block for chunk in chunks for block in chunk} == {
        *publisher.blocks_of(BASE).blocks, *publisher.blocks_of(SLOT).blocks
    }  # fmt: skip
    assert len(chunks) > 1
    for chunk in chunks:
        assert len({block in publisher.blocks_of(BASE).blocks for block in chunk}) == 1


async def test_a_trainer_that_returns_to_an_older_base_takes_the_adapters_back_too(seed: FakeSeed) -> None:
    publisher = Publisher(seed)
    wanted, old_base = seed.replica.root, {b: seed.replica.block(b).copy() for b in range(SMALL.n_blocks)}
    for part in (BASE, SLOT):
        await publisher.begin(part=part)
        deltas, root = step(seed, publisher, part)
        await publisher.add(deltas)
        await publisher.end(1, root)
    attempt = await publisher.begin(VersionRef(wanted))
    assert (attempt.epoch, attempt.version) == (1, 0)
    deltas = [publisher.view(BASE).encode_changes(block, bits) for block, bits in old_base.items()]
    await publisher.add([found.delta for found in deltas if found is not None])
    sealed = await publisher.end(1, state_root(SMALL.hash, publisher.hashes))
    assert sealed.root == wanted == seed.receiver.root
    assert sealed.parts == {BASE, SLOT}
