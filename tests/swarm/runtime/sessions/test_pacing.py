"""One uplink, many streams: together they send at its rate, in any order."""

import math
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from stream_kit import memory_pair, taking

from swarm.runtime.sessions.pacing import BURST_S, MISSED_S, Paced, Pacer

Send = Callable[[bytes | bytearray | memoryview], Awaitable[None]]
MBIT = 80.0  # 10 MB/s
BYTES_S = MBIT * 125_000
AT_ONCE_S = BURST_S + MISSED_S


@pytest.mark.parametrize("streams", [1, 5])
async def test_all_streams_together_send_at_the_uplinks_rate(autojump_clock: object, streams: int) -> None:
    pacer, left = Pacer(MBIT), [0]
    began = trio.current_time()

    async def send(parts: int) -> None:
        for _ in range(parts):
            await pacer.admit(20_000)
            left[0] += 20_000
            assert left[0] - 20_000 <= BYTES_S * (trio.current_time() - began + AT_ONCE_S) + 1

    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(send, 500 // streams)
    took = trio.current_time() - began
    assert took == pytest.approx(10_000_000 / BYTES_S - AT_ONCE_S, abs=0.01)


async def test_a_pause_is_not_saved_up(autojump_clock: object) -> None:
    pacer = Pacer(MBIT)
    await pacer.admit(1_000_000)
    await trio.sleep(60)
    began = trio.current_time()
    for _ in range(100):
        await pacer.admit(20_000)
    assert trio.current_time() - began == pytest.approx(1_980_000 / BYTES_S - AT_ONCE_S, abs=0.001)


async def test_turns_that_a_busy_machine_missed_are_spread_out(mock_clock: trio.testing.MockClock) -> None:
    pacer, left = Pacer(MBIT), [0]

    async def send() -> None:
        await pacer.admit(190_000)  # 19 ms each
        left[0] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(send)
        await trio.testing.wait_all_tasks_blocked()
        assert left[0] == 2
        mock_clock.jump(0.1)  # five turns late
        await trio.testing.wait_all_tasks_blocked()
        assert left[0] == 4
        for gone in range(5, 11):
            mock_clock.jump(0.02)
            await trio.testing.wait_all_tasks_blocked()
            assert left[0] == gone


async def test_a_cancelled_turn_goes_to_the_next_task(autojump_clock: object) -> None:
    pacer, left = Pacer(MBIT), []

    async def send(number: int) -> None:
        await pacer.admit(100_000)  # 10 ms each
        left.append((number, round(trio.current_time() - began, 3)))

    async def give_up(number: int) -> None:
        with trio.move_on_after(0.001):
            await send(number)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(give_up if number in (3, 4, 6) else send, number)
            await trio.lowlevel.checkpoint()
    assert left == [(0, 0.0), (1, 0.0), (2, 0.0), (5, 0.01), (7, 0.02)]


@pytest.mark.parametrize(("extra", "slower"), [(0.0, 1.0), (0.04, 1.04), (3.0, 2.0)])
async def test_other_traffic_is_charged_but_never_more_than_half_of_the_uplink(
    autojump_clock: object, extra: float, slower: float
) -> None:
    left = [0.0]
    pacer = Pacer(MBIT, lambda: int(left[0]))
    began = trio.current_time()
    for _ in range(500):
        await pacer.admit(20_000)
        left[0] += 20_000 * (1 + extra)
    took = trio.current_time() - began
    assert took == pytest.approx(slower * 10_000_000 / BYTES_S - AT_ONCE_S, rel=0.04)


async def test_other_traffic_during_a_pause_is_not_charged(autojump_clock: object) -> None:
    left = [0]
    pacer = Pacer(MBIT, lambda: left[0])
    await pacer.admit(20_000)
    await trio.sleep(60)
    left[0] += 1 << 30
    began = trio.current_time()
    for _ in range(100):
        await pacer.admit(20_000)
        left[0] += 20_000
    assert trio.current_time() - began == pytest.approx(1_980_000 / BYTES_S - AT_ONCE_S, abs=0.005)


async def test_the_time_of_a_part_whose_connection_is_stuck_goes_to_others(autojump_clock: object) -> None:
    left = [0]
    pacer = Pacer(MBIT, lambda: left[0])
    began = trio.current_time()
    for number in range(500):
        await pacer.admit(20_000)
        left[0] += 20_000 if number % 2 else 0  # every other part does not leave this machine
    assert 5_000_000 / BYTES_S <= trio.current_time() - began <= 8_500_000 / BYTES_S


@pytest.mark.parametrize(("mbit", "most"), [(1.0, 16 << 10), (MBIT, 125_000), (math.inf, 1_000_000)])
async def test_no_part_is_longer_than_a_routers_queue(
    autojump_clock: object, monkeypatch: pytest.MonkeyPatch, mbit: float, most: int
) -> None:
    near, far = memory_pair()
    sizes: list[int] = []

    async def noted(data: bytes | bytearray | memoryview, send: Send = near.send_all) -> None:
        sizes.append(len(data))
        await send(data)

    monkeypatch.setattr(near, "send_all", noted)
    content = bytes(range(250)) * 4000
    await Paced(near, Pacer(mbit)).send_all(content)
    await near.send_eof()
    assert b"".join([part async for part in far]) == content
    assert max(sizes) == most


async def test_nothing_waits_when_the_uplink_is_unknown(autojump_clock: object) -> None:
    pacer, began = Pacer(math.inf), trio.current_time()
    for _ in range(1000):
        await pacer.admit(1 << 30)
    assert trio.current_time() == began


async def test_a_paced_stream_delivers_its_bytes_in_order(autojump_clock: object) -> None:
    near, far = memory_pair()
    paced, got = Paced(near, Pacer(MBIT)), bytearray()
    async with paced:
        for number in range(10):
            await paced.send_all(bytes([number]) * 1000)
            await paced.wait_send_all_might_not_block()
    async for part in far:
        got += part
    assert got == b"".join(bytes([number]) * 1000 for number in range(10))


async def test_planned_traffic_goes_first_and_deferrable_traffic_keeps_a_fifth(autojump_clock: object) -> None:
    """Ten streams of late joiners and one of a planned child, which gets four fifths of the uplink, not an eleventh."""
    pacer, left = Pacer(MBIT), {True: 0, False: 0}
    began = trio.current_time()

    async def send(deferrable: bool) -> None:
        while True:
            await pacer.admit(20_000, deferrable=deferrable)
            left[deferrable] += 20_000

    with trio.move_on_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(send, True)
            await trio.sleep(1)
            assert left[True] == pytest.approx(BYTES_S, rel=0.05), "alone, deferrable traffic has the whole uplink"
            left[True] = 0
            nursery.start_soon(send, False)
    took = trio.current_time() - began - 1
    assert left[False] == pytest.approx(0.8 * BYTES_S * took, rel=0.03)
    assert left[True] == pytest.approx(0.2 * BYTES_S * took, rel=0.03)


async def test_planned_traffic_overtakes_deferrable_traffic_that_waits(autojump_clock: object) -> None:
    pacer, left = Pacer(MBIT), []

    async def send(name: str, deferrable: bool) -> None:
        await pacer.admit(100_000, deferrable=deferrable)
        left.append(name)

    async with trio.open_nursery() as nursery:
        for name, rest in (("a", True), ("b", True), ("c", True), ("d", True), ("e", True), ("f", False), ("g", False)):
            nursery.start_soon(send, name, rest)
            await trio.lowlevel.checkpoint()
    assert left == ["a", "b", "c", "f", "g", "d", "e"]


async def test_what_is_sent_at_once_is_paced_with_the_rest(autojump_clock: object) -> None:
    pacer, stream = Pacer(MBIT), taking()
    paced, part = Paced(stream, pacer), bytes(pacer.part_bytes)
    assert not paced.send_now([part, b"longer than a part"])
    stream.is_open = False
    assert not paced.send_now([part]), "the stream does not take it"
    stream.is_open = True
    assert paced.send_now([part[:9], part[9:]])
    assert paced.send_now([part])
    assert not paced.send_now([part]), "it would leave ahead of its time"
    assert stream.taken == [part, part]
    began = trio.current_time()
    await pacer.admit(1)
    assert trio.current_time() - began == pytest.approx(2 * len(part) / BYTES_S - AT_ONCE_S, abs=0.001)


async def test_nothing_is_sent_at_once_before_planned_traffic_that_waits(autojump_clock: object) -> None:
    pacer, stream = Pacer(MBIT), taking()
    await pacer.admit(pacer.part_bytes)
    await pacer.admit(pacer.part_bytes)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pacer.admit, 1)
        await trio.testing.wait_all_tasks_blocked()
        assert not Paced(stream, pacer).send_now([b"x"])
    assert stream.taken == []


async def test_an_uplink_of_unknown_rate_sends_at_once() -> None:
    stream = taking()
    assert Paced(stream, Pacer()).send_now([bytes(1 << 20)])
    assert [len(taken) for taken in stream.taken] == [1 << 20]
