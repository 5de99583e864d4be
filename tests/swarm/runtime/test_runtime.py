"""Timers and records; and nothing outlives the runtime."""

from pathlib import Path

import trio
from bench_kit import PEER, bench, chunks, header_frame
from runtime_kit import AUTHORITY

from codec import ChunkKey, open_header
from swarm.protocol.core.events import Drop, Persist, Persisted, SendDone, SendPiece, SetTimer, Timer, VersionId


async def test_timers_come_when_due_and_the_newest_of_a_name_counts(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        now = trio.current_time()
        b.runtime.perform([SetTimer("a", now + 5), SetTimer("b", now + 2), SetTimer("a", now + 1)])
        await b.runtime.apply(Timer("wake"))  # the loop sleeps until it looks at its timers again
        await b.settle(10)
        due = [(event.name, at) for event, at in zip(b.core.events, b.core.at_s, strict=True) if event != Timer("wake")]
        assert due == [("a", now + 1), ("b", now + 2)]


async def test_records_are_durable_before_the_core_is_told(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.runtime.perform([Persist("t1", "grant/1", b"a"), Persist("t2", "grant/1", b"b")])
        await b.settle()
        assert b.core.of(Persisted) == [Persisted("t1"), Persisted("t2")]
        assert b.store.records.get("grant/1") == b"b"


async def test_nothing_outlives_the_runtime(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        control = await b.control()
        bulk = await b.bulk()
        await bulk.send_all(header_frame(chunks()[0])[:50])
        await control.send_all(b"\x09")
    assert b.me.peers() == []


async def test_a_queue_skips_pieces_of_dropped_chunks(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        key = ChunkKey(0, 1, 0, 0)
        b.runtime.perform([SendPiece(PEER.public, 0, key, 0)])
        await b.settle()
        assert b.core.of(SendDone) == [SendDone(PEER.public, 0, key, 0)]  # its place in the queue is free


async def test_chunks_of_versions_that_a_start_restored_stay_on_disk(tmp_path: Path, autojump_clock: object) -> None:
    """They lead from the checkpoint to the head; the store drops them when a newer checkpoint is there."""
    made = chunks()[0]
    header = open_header(made.header, AUTHORITY.public)
    async with bench(tmp_path, restored=VersionId(0, 1)) as b:
        b.store.chunks.put_header(header, made.header)
        b.runtime.perform([Drop(VersionId(0, 1))])
        assert b.store.chunks.chunk(header.key) is not None
        b.runtime.perform([Drop(VersionId(0, 2))])
        b.runtime.perform([Drop(VersionId(0, 1), attempt=0)])
        assert b.store.chunks.chunk(header.key) is None
