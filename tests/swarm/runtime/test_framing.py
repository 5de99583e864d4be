"""The deadline of a message's rest, and what it costs while nothing is waited for."""

import pytest
import trio
import trio.testing

from swarm.protocol.core.wire import Ping
from swarm.runtime.framing import ByteReader, Patience, frame_message, read_message

DEADLINE_S = 10.0


class Steps(trio.abc.Instrument):
    """Counts how often tasks run."""

    def __init__(self) -> None:
        self.count = 0

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_a_wait_that_lasts_too_long_ends_the_watch(autojump_clock: trio.testing.MockClock) -> None:
    patience = Patience(DEADLINE_S)

    async def wait() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            await trio.sleep(100)
            patience.begin()
            await trio.sleep(100)

    began_s = trio.current_time()
    with pytest.raises(ExceptionGroup) as caught:
        await wait()
    assert caught.group_contains(trio.TooSlowError)
    assert trio.current_time() - began_s == pytest.approx(100 + DEADLINE_S)


async def test_a_wait_that_ended_and_began_again_has_the_whole_time(autojump_clock: trio.testing.MockClock) -> None:
    patience = Patience(DEADLINE_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(patience.watch)
        for _ in range(5):
            patience.begin()
            await trio.sleep(0.9 * DEADLINE_S)
            patience.end()
        nursery.cancel_scope.cancel()


async def test_the_watch_sleeps_while_nothing_is_waited_for(autojump_clock: trio.testing.MockClock) -> None:
    patience, steps = Patience(DEADLINE_S), Steps()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(patience.watch)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.add_instrument(steps)
        await trio.sleep(100 * DEADLINE_S)
        trio.lowlevel.remove_instrument(steps)
        nursery.cancel_scope.cancel()
    assert steps.count <= 2  # this test's own task


@pytest.mark.parametrize("first", [2, 4, 6])
async def test_a_message_in_two_parts_has_a_deadline_and_one_that_comes_whole_needs_none(
    first: int, autojump_clock: trio.testing.MockClock
) -> None:
    near, far = trio.testing.memory_stream_pair()
    patience, data = Patience(DEADLINE_S), frame_message(Ping(7))

    async def read() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            await near.send_all(data)
            reader = ByteReader(AtLeast(far))
            assert await read_message(reader, patience) == (Ping(7), len(data))
            await trio.sleep(100)
            await near.send_all(data[:first])
            await read_message(reader, patience)

    with pytest.raises(ExceptionGroup) as caught:
        await read()
    assert caught.group_contains(trio.TooSlowError)


class AtLeast:
    """A stream of trio's with what the runtime needs of ours."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream

    async def receive_at_least(self, least: int, most: int) -> bytes:
        return bytes(await self._stream.receive_some(most))
