"""Blocks in a rank's ring: what the seed takes of them, and what it refuses before it would write it."""

import numpy as np
import pytest
from seed_kit import FakeSeed, random_replica

from codec import BlockDelta, StagedBlock, open_header
from codec.chunk import CODER_RAW, CODER_RICE, Chunk
from codec.errors import PeerError
from node.coordinator.publisher import Publisher
from node.coordinator.shared_blocks import read_shared
from node.ipc.ring import RingReader, RingWriter
from node.trainers.messages import SharedDelta
from swarm.runtime.replica.own import OwnChunk

REPLICA = random_replica()
POSITIONS = np.array([3, 70, 1000], np.uint32)
BITS = np.array([1, 2, 3], np.uint16)
PAYLOAD = b"the coded form"


def put(writer: RingWriter, **changed: object) -> SharedDelta:
    record = [POSITIONS.view(np.uint8).data, BITS.view(np.uint8).data, PAYLOAD]
    at = writer.put(record)
    assert at is not None
    fields = {"block": 0, "coder": CODER_RICE, "new_hash": b"h" * 32, "at": at, "payload": len(PAYLOAD), "listed": 3}
    return SharedDelta(**fields | changed)  # type: ignore[arg-type]


@pytest.fixture
def ring() -> tuple[RingWriter, RingReader]:
    writer = RingWriter(1 << 14)
    assert writer.fd is not None
    return writer, RingReader(writer.fd, writer.size)


def test_the_seed_gets_the_coded_form_and_the_list(ring: tuple[RingWriter, RingReader]) -> None:
    writer, reader = ring
    delta, known = read_shared(put(writer), reader, REPLICA)
    assert (delta.block, delta.coder, delta.new_hash, bytes(delta.payload)) == (0, CODER_RICE, b"h" * 32, PAYLOAD)
    assert known is not None
    np.testing.assert_array_equal(known.positions, POSITIONS)
    np.testing.assert_array_equal(known.bits, BITS)
    assert known.old_hash == REPLICA.hashes[0].tobytes()
    delta, known = read_shared(put(writer, listed=0, payload=10), reader, REPLICA)
    assert (len(delta.payload), known) == (10, None)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"block": 99}, "99 of"),
        ({"block": 2, "listed": 2}, "beyond 7"),  # of seven elements: position 70 would be written beyond it
        ({"block": 2, "listed": 8}, "8 of 7"),
        ({"payload": 1 << 15}, "ring"),
        ({"at": 1 << 40 | 1}, "ring"),
    ],
)
def test_what_no_trainer_sends_is_refused(
    ring: tuple[RingWriter, RingReader], changed: dict[str, int], why: str
) -> None:
    writer, reader = ring
    with pytest.raises(PeerError, match=why):
        read_shared(put(writer, **changed), reader, REPLICA)


async def test_a_chunk_is_known_only_if_all_of_its_blocks_are() -> None:
    seed = FakeSeed(random_replica())
    came: list[tuple[Chunk, OwnChunk | None]] = []

    async def keep(chunk: Chunk, known: OwnChunk | None = None) -> None:
        came.append((chunk, known))

    seed.add_chunk = keep  # type: ignore[method-assign]
    for number, listed in enumerate([(0, 1), (0,), ()]):
        publisher = Publisher(seed)
        await publisher.begin()
        deltas = [BlockDelta(block, CODER_RICE, bytes(32), PAYLOAD) for block in (0, 1)]
        deltas.append(BlockDelta(2, CODER_RAW, bytes(32), bytes(14)))
        known = [StagedBlock(block, POSITIONS, BITS, bytes(32), bytes(32)) for block in listed]
        await publisher.add(deltas, known)
        (rest,) = publisher._current().packer.flush()
        await publisher._current().send(rest)
        chunk, found = came[number]
        assert chunk.opened == open_header(chunk.header, seed.key.public)
        assert (found is not None) == (len(listed) == 2)
        assert found is None or [block.block for block in found.blocks] == [0, 1]
        assert publisher._current().known == {} or len(listed) < 2
        await publisher.abandon()
