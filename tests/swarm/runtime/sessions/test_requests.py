"""Requests to peers, and the answers that are accepted."""

from pathlib import Path

import pytest
from bench_kit import PEER, bench, part_frame
from runtime_kit import AUTHORITY, new_replica

from swarm.protocol.core.events import PieceBad, Send
from swarm.protocol.core.wire import Blob, WantBlob, WantBlock


async def test_a_file_must_have_the_requested_hash(tmp_path: Path, autojump_clock: object) -> None:
    from blake3 import blake3

    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        body = b"tokenizer" * 40_000
        name = blake3(body).digest()
        b.runtime.perform([Send(PEER.public, WantBlob(1, Blob.FILE, name, 0))])
        half = len(body) // 2
        await stream.send_all(part_frame(1, body[:half], 0, len(body)) + part_frame(1, body[half:], half))
        await b.settle()
        assert b.store.file(name) == body
        assert [type(event).__name__ for event in b.core.events] == ["PeerUp", "PartsDone"]

        b.runtime.perform([Send(PEER.public, WantBlob(2, Blob.FILE, b"n" * 32, 0))])
        await stream.send_all(part_frame(2, body))
        await b.settle()
        assert "blob.hash" in b.core.of(PieceBad)[0].what


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        (part_frame(1, b"x", 0, 1 << 39), "part.total"),
        (part_frame(1, b"x" * 10, 0, 20) + part_frame(1, b"x" * 10, 5, 20), "out of order"),
        (part_frame(1, b"x" * 10, 0, 20) + part_frame(1, b"x" * 5, 10, 30), "out of order"),
        (part_frame(1, b"", 0, 20), "part.length"),
    ],
    ids=["too large", "overlapping", "another total", "empty"],
)
async def test_parts_come_in_order_and_within_bounds(
    tmp_path: Path, autojump_clock: object, frames: bytes, why: str
) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        stream = await b.bulk()
        b.runtime.perform([Send(PEER.public, WantBlob(1, Blob.FILE, b"n" * 32, 0))])
        await stream.send_all(frames)
        await b.settle()
        assert why in b.core.of(PieceBad)[0].what


async def test_a_block_is_accepted_only_with_the_hash_of_its_version(tmp_path: Path, autojump_clock: object) -> None:
    from codec import Manifest

    async with bench(tmp_path) as b:
        truth = new_replica(1)
        b.model.replica = new_replica(2)
        manifest = Manifest(AUTHORITY.public, 0, 0, 0, bytes(32), truth.root, truth.layout.hash, (), 0, 0)
        await b.control()
        stream = await b.bulk()
        b.runtime.perform([Send(PEER.public, WantBlock(1, 0))])
        await stream.send_all(part_frame(1, truth.read_block(0)))
        await b.settle()
        assert type(b.core.events[-1]).__name__ == "UnknownLabel"  # without a manifest there is no hash to compare with

        b.runtime.manifests.note(manifest.seal(AUTHORITY))
        b.runtime.perform([Send(PEER.public, WantBlob(2, Blob.HASHES, truth.root, 0))])
        await stream.send_all(part_frame(2, truth.hashes.tobytes()))
        await b.settle()
        assert b.core.events[-1].differs == (0, 1, 2)  # type: ignore[attr-defined]

        b.runtime.perform([Send(PEER.public, WantBlock(3, 0)), Send(PEER.public, WantBlock(4, 0))])
        await stream.send_all(part_frame(3, truth.read_block(0)))
        await b.settle()
        assert b.runtime.counts.stray == len(
            truth.read_block(0)
        )  # requested again since then, so this answer does not count
        await stream.send_all(part_frame(4, truth.read_block(0)))
        await b.settle()
        assert b.core.events[-1].request == 4  # type: ignore[attr-defined]
        assert b.model.replica.read_block(0) == truth.read_block(0)

        b.runtime.perform([Send(PEER.public, WantBlock(5, 1))])
        await stream.send_all(part_frame(5, bytes(len(truth.read_block(1)))))
        await b.settle()
        assert "block.hash" in b.core.of(PieceBad)[0].what
        assert b.model.replica.read_block(1) != bytes(len(truth.read_block(1)))
