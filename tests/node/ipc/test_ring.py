"""A ring of shared memory: records come out as they went in, room is given back, and a false place is refused."""

import os
import random

import pytest

from codec.errors import PeerError
from codec.shared import reserve
from node.ipc.ring import MAX_RING_BYTES, RingReader, RingWriter


def test_records_come_out_as_they_went_in_and_room_is_used_again() -> None:
    writer = RingWriter(1 << 12)
    assert writer.fd is not None
    reader, rng = RingReader(writer.fd, writer.size), random.Random(0)
    waiting: list[tuple[int, bytes]] = []
    refused = 0
    for _ in range(2000):
        record = rng.randbytes(rng.randrange(1, 1 << 11))
        cut = rng.randrange(len(record))
        while (at := writer.put([record[:cut], memoryview(record)[cut:]])) is None:
            refused += 1
            place, wanted = waiting.pop(0)
            assert reader.copy(place, len(wanted)) == wanted
            reader.give_back(place + len(wanted))
        assert at % 8 == 0
        waiting.append((at, record))
    assert refused > 100
    for place, wanted in waiting:
        assert reader.copy(place, len(wanted)) == wanted


@pytest.mark.parametrize(("at", "length"), [(4, 8), (1 << 12, (1 << 12) + 1), ((1 << 12) - 8, 9), (8, 1 << 12)])
def test_a_record_outside_the_ring_is_refused(at: int, length: int) -> None:
    writer = RingWriter(1 << 12)
    assert writer.fd is not None
    with pytest.raises(PeerError, match="ring"):
        RingReader(writer.fd, writer.size).copy(at, length)


def test_memory_that_could_shrink_or_has_another_size_is_refused() -> None:
    fd, _ = reserve("unsealed", (1 << 12) + 4096)
    assert fd is not None
    with pytest.raises(PeerError, match="not sealed"):
        RingReader(fd, 1 << 12)
    os.close(fd)
    writer = RingWriter(1 << 12)
    assert writer.fd is not None
    for size in (1 << 11, 1 << 13, 0, MAX_RING_BYTES + 8):
        with pytest.raises(PeerError, match="ring"):
            RingReader(writer.fd, size)
    end, other = os.pipe()
    with pytest.raises(PeerError, match="ring"):
        RingReader(end, 1 << 12)
    os.close(end)
    os.close(other)
    writer.close()
    writer.close()
