"""The publisher alone: blocks in any order, chunks passed on when full, and the calls that it refuses."""

from collections.abc import Iterator

import numpy as np
import pytest
import trio
from seed_kit import FakeSeed, random_replica

from codec import BlockDelta, Layout, Replica, TensorSpec, state_root
from codec.chunk import MIN_PIECE_BYTES
from codec.errors import PeerError
from codec.parts import BASE
from node.coordinator.publisher import Busy, Publisher

WIDE = Layout(tuple(TensorSpec(f"t{i:02}", "BF16", (1 << 18,)) for i in range(24)))


def changes(replica: Replica, every: int) -> tuple[list[BlockDelta], int, bytes]:
    """Return (deltas of a version that changes one element in `every`, number of changed elements, its root)."""
    deltas, hashes, changed = [], replica.hashes.copy(), 0
    for block in range(replica.layout.n_blocks):
        new = replica.block(block).copy()
        new[::every] ^= np.ones((), new.dtype)
        delta = replica.encode_block(block, new)
        assert delta is not None
        hashes[block] = np.frombuffer(delta.new_hash, np.uint8)
        changed += len(new[::every])
        deltas.append(delta)
    return deltas, changed, state_root(replica.layout.hash, hashes)


@pytest.fixture
def seed() -> Iterator[FakeSeed]:
    return FakeSeed(random_replica(WIDE))


@pytest.mark.parametrize("every", [20, 1])
async def test_blocks_in_any_order_become_one_version(seed, every):
    publisher = Publisher(seed)
    deltas, changed, root = changes(seed.replica, every)
    await publisher.begin()
    seen = []
    for i in np.random.default_rng(1).permutation(len(deltas)):
        await publisher.add([deltas[i]])
        seen.append(len(seed.chunks))
    assert seen[len(seen) // 2] > 0, "chunks leave while later blocks are still being encoded"
    assert sorted(seen) == seen
    sealed = await publisher.end(changed, root)
    assert not publisher.busy
    assert sealed.root == root == seed.receiver.root == seed.replica.root
    assert seed.receiver.rehash() == []
    manifest = seed.manifests[-1]
    assert (manifest.changed, manifest.payload_bytes) == (changed, sealed.payload_bytes)
    assert len(manifest.chunk_ids) == sealed.chunks
    assert seed.chunks == []


async def test_a_version_without_changes_is_published(seed):
    publisher = Publisher(seed)
    before = seed.replica.root
    await publisher.begin()
    sealed = await publisher.end(0, before)
    assert sealed == (before, 0, 0, before, {BASE})
    assert seed.head == (0, 1)


async def test_impossible_calls_are_refused(seed):
    publisher = Publisher(seed)
    deltas, changed, root = changes(seed.replica, 100)
    with pytest.raises(PeerError, match="no version is open"):
        await publisher.add(deltas)
    with pytest.raises(PeerError, match="no version is open"):
        await publisher.end(changed, root)
    await publisher.begin()
    with pytest.raises(Busy):
        await publisher.begin()
    await publisher.add(deltas[:1])
    with pytest.raises(PeerError, match="came twice"):
        await publisher.add(deltas[:1])
    with pytest.raises(PeerError, match="99 of 24"):
        await publisher.add([BlockDelta(99, 0, bytes(32), b"x")])
    with pytest.raises(PeerError, match="do not add up"):
        await publisher.end(changed, root)
    await publisher.abandon()
    await publisher.abandon()
    assert seed.abandoned == 1
    attempt = await publisher.begin()
    assert (attempt.version, attempt.attempt) == (1, 1)
    await publisher.add(deltas)
    assert (await publisher.end(changed, root)).root == seed.receiver.root


async def test_the_pieces_of_a_version_larger_than_expected_grow_with_it(seed, monkeypatch):
    sent = []
    add_chunk = seed.add_chunk

    async def note(chunk, known=None):
        sent.append((chunk.opened.piece_bytes, chunk.body))
        await add_chunk(chunk, known)

    monkeypatch.setattr(seed, "add_chunk", note)
    publisher = Publisher(seed)
    await publisher.begin()
    for block in range(seed.replica.layout.n_blocks):
        delta = seed.replica.encode_block(block, np.random.default_rng(block).integers(0, 1 << 16, 1 << 18, np.uint16))
        assert delta is not None
        await publisher.add([delta])
    await publisher.end(24 << 18, state_root(seed.replica.layout.hash, publisher.hashes))
    sizes = [size for size, _ in sent]
    assert sizes == sorted(sizes)
    assert sizes[0] == MIN_PIECE_BYTES < sizes[-1]
    before = 0
    for size, body in sent:
        assert size == MIN_PIECE_BYTES or size < before / 50, "the last piece takes a small part of the version's time"
        before += len(body)


async def test_of_two_that_begin_at_once_one_is_refused(seed):
    publisher = Publisher(seed)
    outcomes: list[str] = []

    async def begin() -> None:
        try:
            await publisher.begin()
            outcomes.append("open")
        except Busy:
            outcomes.append("busy")

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(begin)
    assert sorted(outcomes) == ["busy", "busy", "open"]
    await publisher.abandon()
    await publisher.begin()
