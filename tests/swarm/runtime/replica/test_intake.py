"""A trainer's chunks are stored in order, many in one call, and a version is sealed only once all are stored."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from codec import ChunkKey
from codec.errors import SwarmError
from swarm.runtime.replica.intake import ChunkIntake
from swarm.store import StoredChunk

MIB = 1 << 20


def chunk(seq: int, size: int = 1000) -> StoredChunk:
    header: Any = None  # not used here
    return StoredChunk(ChunkKey(0, 1, 0, seq), header, b"", (size,))


class Bench:
    """An intake whose calls to a worker thread take a second each, and the chunks of each call."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.visits: list[list[int]] = []
        self.fails: dict[int, Exception] = {}
        self.nursery = nursery
        self.intake = ChunkIntake(self._keep, self._start, self._run_sync)

    def _keep(self, chunks: list[StoredChunk]) -> None:
        self.visits.append([each.key.seq for each in chunks])
        for each in chunks:
            if each.key.seq in self.fails:
                raise self.fails[each.key.seq]

    def _start(self, work: Callable[[], Awaitable[None]]) -> None:
        self.nursery.start_soon(work)

    async def _run_sync(self, function: Callable[..., Any], *arguments: Any) -> Any:
        await trio.sleep(1)
        return function(*arguments)


async def test_chunks_that_arrive_during_a_call_go_in_the_next_one(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        await bench.intake.add_chunk(chunk(0))
        await trio.sleep(0.5)
        for seq in range(1, 10):
            await bench.intake.add_chunk(chunk(seq))
        await bench.intake.wait_until_stored()
        assert bench.visits == [[0], [*range(1, 10)]]
        await trio.sleep(60)
        await bench.intake.add_chunk(chunk(10))  # and after a pause
        await bench.intake.wait_until_stored()
        assert bench.visits[2:] == [[10]]


async def test_add_chunk_waits_for_the_disk_when_too_much_waits(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        began = trio.current_time()
        for seq in range(17):
            await bench.intake.add_chunk(chunk(seq, MIB))
        assert trio.current_time() - began == 1  # the call with the other chunks
        await bench.intake.wait_until_stored()
        assert bench.visits == [[*range(17)]]


async def test_a_failure_is_raised_until_clear(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        bench.fails[0] = SwarmError("full")
        await bench.intake.add_chunk(chunk(0))
        with pytest.raises(SwarmError, match="full"):
            await bench.intake.wait_until_stored()
        with pytest.raises(SwarmError, match="full"):
            await bench.intake.add_chunk(chunk(1))
        await bench.intake.clear()
        await bench.intake.add_chunk(chunk(2))
        await bench.intake.wait_until_stored()
        assert bench.visits == [[0], [2]]


async def test_clear_forgets_waiting_chunks(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        await bench.intake.add_chunk(chunk(0))
        await trio.sleep(0.5)
        await bench.intake.add_chunk(chunk(1))
        began = trio.current_time()
        await bench.intake.clear()
        assert trio.current_time() - began == 0.5  # a running call is not interrupted
        assert bench.visits == [[0]]


async def test_when_the_runtime_ends_callers_stop_waiting_and_nothing_can_be_sealed(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        await bench.intake.add_chunk(chunk(0))
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            with pytest.raises(SwarmError, match="ended"):
                await bench.intake.wait_until_stored()
            await bench.intake.clear()
        assert bench.visits == []
