"""What a peer is charged for its frames, streams and bytes, over all of its connections."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from yamux_kit import LIMITS, Peer, acted, data, until_blocked, window

from swarm.transport.connection.muxer import MuxedStream
from swarm.transport.yamux import Connection, PeerBudget, PeerBudgets, StreamLink, YamuxLimits
from swarm.transport.yamux.cost import Cost
from swarm.transport.yamux.frames import ACK, FIN, INITIAL_WINDOW_BYTES, RST, SYN, Head, Kind, encode_head

SLOW = replace(LIMITS, units_per_s=1000.0, units_at_once=1000.0)
EMPTY = encode_head(Kind.WINDOW, 0, 99, 0)


class Burst:
    """A link that brings `data` in one read, in memory that the next read would reuse, and then nothing."""

    def __init__(self, data: bytes) -> None:
        self._view: memoryview | None = memoryview(bytearray(data))

    async def receive(self) -> memoryview:
        await trio.lowlevel.checkpoint()
        if self._view is None:
            await trio.sleep_forever()
        view, self._view = self._view, None
        assert view is not None
        self._lent = view
        return view

    def overwrite(self) -> None:
        self._lent[:] = bytes(len(self._lent))

    async def send(self, parts: object) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_other_tasks_run_between_many_frames() -> None:
    """Regression: 256 KiB of empty frames in one read were handled at once, and other tasks waited for 40 to 400 ms."""
    link = Burst(window(1, flags=SYN) + EMPTY * 20_000 + data(1, b"after them", FIN))
    ours = Connection(link, client=False, limits=LIMITS)
    turns = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ours.run)
        stream = await ours.accept()
        link.overwrite()  # the rest of the read must have been copied by now
        while not stream.fin_received:
            turns += 1
            await trio.lowlevel.checkpoint()
        assert turns >= 20_000 // Cost.TURN - 1
        assert await stream.receive_some() == b"after them"
        nursery.cancel_scope.cancel()
    assert "the connection was closed" in ours.reason


@pytest.mark.parametrize(
    ("frame", "units"),
    [
        (EMPTY, Cost.FRAME),
        (encode_head(Kind.PING, SYN, 0, 1), Cost.FRAME + Cost.ANSWER),
        (data(99, b"?"), Cost.FRAME + Cost.ANSWER),
        (encode_head(Kind.GO_AWAY, 0, 0, 0), Cost.FRAME),
    ],
)
async def test_a_peer_in_debt_is_not_read(frame: bytes, units: int, autojump_clock: trio.testing.MockClock) -> None:
    async with acted(replace(SLOW, max_control_frames=10**6)) as peer:
        count = 12_000 // units
        await peer.stream.send_all(frame * count + data(1, b"last", SYN))
        begun_s = trio.current_time()
        await peer.ours.accept()
        assert 10.5 < trio.current_time() - begun_s < 12.5  # 12000 units, 1000 at once and 1000 a second
        assert not peer.ours.closed


async def test_streams_that_are_opened_and_reset_in_a_loop(autojump_clock: trio.testing.MockClock) -> None:
    async with acted(SLOW) as peer:
        opened = 0

        async def accept() -> None:
            nonlocal opened
            while True:
                await peer.ours.accept()
                opened += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            loop = [window(stream_id, flags=SYN) + window(stream_id, flags=RST) for stream_id in range(1, 2001, 2)]
            await peer.stream.send_all(b"".join(loop))
            await trio.sleep(5)
            assert 40 <= opened <= (1000 + 5 * 1000) // Cost.OPEN + 2
            nursery.cancel_scope.cancel()


async def test_pings_are_answered_while_in_debt(autojump_clock: trio.testing.MockClock) -> None:
    async with acted(replace(SLOW, units_per_s=100.0)) as peer:
        await peer.stream.send_all(EMPTY * 1500)
        await trio.sleep(0.1)
        begun_s = trio.current_time()
        await peer.stream.send_all(encode_head(Kind.PING, SYN, 0, 7))
        while Head(Kind.PING, ACK, 0, 7) not in peer._heads:  # noqa: ASYNC110
            await trio.sleep(0.1)
        assert trio.current_time() - begun_s < 7  # the frames before it are paid for first


async def test_the_connection_of_a_peer_in_debt_lives(autojump_clock: trio.testing.MockClock) -> None:
    """A peer counts as heard while frames of it wait to be handled."""
    limits = replace(SLOW, units_per_s=200.0, ping_interval_s=1.0, silence_s=3.0)
    async with acted(limits) as peer:
        await peer.stream.send_all(EMPTY * 3000 + data(1, b"last", SYN))
        await peer.ours.accept()
        assert trio.current_time() > 9


@pytest.mark.parametrize(
    ("reads_per_s", "read_bytes", "frames", "woken"),
    [
        (7600, 16_384, 1, 1),  # bulk at a gigabit a second, in records of TLS
        (500, 262_144, 3, 1),  # the same in large reads
        (4000, 32_768, 32, 2),  # frames of 1 KiB at full speed
        (200, 120, 2, 1),  # control
        (50, 60, 2, 0),  # pings and windows
    ],
)
def test_honest_traffic_never_waits(reads_per_s: int, read_bytes: int, frames: int, woken: int) -> None:
    budget = PeerBudget(YamuxLimits())
    units = Cost.RECEIVE + frames * Cost.FRAME + woken * Cost.WAKE - read_bytes // Cost.BYTES_A_UNIT
    assert not any(budget.charge_work(units, turn / reads_per_s) for turn in range(60 * reads_per_s))


def test_a_step_of_many_small_messages_does_not_wait() -> None:
    budget = PeerBudget(YamuxLimits())
    units = Cost.RECEIVE + Cost.FRAME + Cost.WAKE
    assert not any(budget.charge_work(units, turn / 1000) for turn in range(2000))
    # If it goes on, reads are some milliseconds apart, and each brings several messages.
    assert max(budget.charge_work(units, 2 + turn / 200) for turn in range(10_000)) < 0.01


# One budget for all connections of a peer.


async def act(nursery: trio.Nursery, budget: PeerBudget, limits: YamuxLimits = LIMITS) -> Peer:
    near_io, far_io = trio.testing.memory_stream_pair()
    peer = Peer(far_io, Connection(StreamLink(near_io), client=False, limits=limits, budget=budget))
    nursery.start_soon(peer.listen)
    nursery.start_soon(peer.ours.run)
    await peer.heard()
    return peer


async def test_streams_and_windows_are_counted_over_all_connections() -> None:
    limits = replace(LIMITS, max_inbound_streams=3, window_budget_bytes=3 << 20)
    budget = PeerBudget(limits)
    async with trio.open_nursery() as nursery:
        first, second = [await act(nursery, budget, limits) for _ in range(2)]
        await first.send(window(1, flags=SYN), window(3, flags=SYN))
        await second.send(window(1, flags=SYN), window(3, flags=SYN))
        assert [head.flags for head in await second.heard()] == [ACK, RST]
        held = first.ours.unread_bytes + second.ours.unread_bytes
        assert held == 3 * INITIAL_WINDOW_BYTES + (3 << 20)
        await first.stream.aclose()  # its share of the budget is free for the other connection
        await trio.testing.wait_all_tasks_blocked()
        await second.send(window(5, flags=SYN), window(7, flags=SYN))
        assert [head.flags for head in await second.heard()] == [ACK, ACK]
        nursery.cancel_scope.cancel()
    assert budget.streams == budget.connections == 0
    assert budget.window.take(1 << 30) == 3 << 20


async def test_work_is_counted_over_all_connections(autojump_clock: trio.testing.MockClock) -> None:
    budget = PeerBudget(SLOW)
    async with trio.open_nursery() as nursery:
        first, second = [await act(nursery, budget, SLOW) for _ in range(2)]
        await first.stream.send_all(EMPTY * 3000)
        await second.stream.send_all(EMPTY * 3000 + data(1, b"x", SYN))
        await second.ours.accept()
        assert trio.current_time() > 4
        nursery.cancel_scope.cancel()


async def test_unread_data_counts_after_its_connection_has_ended() -> None:
    """Otherwise a peer could fill windows, leave, come back, and fill them again."""
    budget = PeerBudget(LIMITS)
    async with trio.open_nursery() as nursery:
        peer = await act(nursery, budget)
        await peer.send(data(1, bytes(1000), SYN), window(3, flags=SYN))
        unread, empty = await peer.streams()
        await peer.send(window(5, flags=SYN))
        await peer.stream.aclose()
        await trio.testing.wait_all_tasks_blocked()
        assert peer.ours.closed
        assert budget.streams == 1  # neither the one without data nor the one that is not accepted
        assert await unread.receive_some() == bytes(1000)
        assert budget.streams == 0
        await empty.aclose()
        nursery.cancel_scope.cancel()


async def test_frames_in_hand_are_bounded_over_all_connections(autojump_clock: trio.testing.MockClock) -> None:
    budget = PeerBudget(replace(SLOW, units_per_s=1.0))
    async with trio.open_nursery() as nursery:
        peers = [await act(nursery, budget) for _ in range(12)]
        for peer in peers:
            nursery.start_soon(peer.stream.send_all, EMPTY * 20_000)  # 240 KB each
        await trio.sleep(2)
        assert [bool(peer.ours.reason) for peer in peers].count(False) == 8
        assert "too many connections" in next(peer.ours.reason for peer in peers if peer.ours.reason)
        nursery.cancel_scope.cancel()


def test_a_budget_outlives_its_connections_for_a_while() -> None:
    budgets = PeerBudgets()
    spent = budgets.for_connection(b"a", LIMITS, 0.0)
    spent.charge_work(LIMITS.units_at_once, 0.0)
    budgets.note_departure(b"a", 1.0)
    assert budgets.for_connection(b"a", LIMITS, 2.0) is spent  # coming back gives no new budget
    budgets.note_departure(b"a", 3.0)
    assert budgets.for_connection(b"b", LIMITS, 14.0) is not spent
    assert budgets.for_connection(b"a", LIMITS, 14.0) is not spent
    used = budgets.for_connection(b"c", LIMITS, 15.0)
    used.connections = 1
    assert budgets.for_connection(b"c", LIMITS, 100.0) is used
    assert len(budgets._budgets) == 1


# Strangers.


async def test_a_stranger_has_an_allowance() -> None:
    async with acted(LIMITS.narrow(6)) as peer:
        await peer.send(data(1, bytes(30_000), SYN), data(3, bytes(2_768), SYN))
        assert not peer.ours.closed
        await peer.send(encode_head(Kind.DATA, 0, 1, 1))  # the header alone exceeds it
        assert "over 32768 bytes" in peer.ours.reason


async def test_an_admitted_peer_has_no_allowance() -> None:
    async with acted(LIMITS.narrow(1)) as peer:
        await peer.send(data(1, bytes(30_000), SYN), window(3, flags=SYN))
        assert [head.flags for head in await peer.heard()] == [ACK, RST]
        peer.ours.widen(LIMITS)
        await peer.send(data(1, bytes(200_000)), window(5, flags=SYN))
        assert [head.flags for head in await peer.heard()] == [ACK]
        assert not peer.ours.closed
        assert peer.ours.budget.max_streams == LIMITS.max_inbound_streams


def test_ten_members_can_make_a_seed_hold_at_most_64_mib() -> None:
    lean = YamuxLimits().lean()
    assert 10 * (lean.max_inbound_streams * INITIAL_WINDOW_BYTES + lean.window_budget_bytes) <= 64 << 20


# The library's protocols.


async def test_what_the_library_reads_is_paced(autojump_clock: trio.testing.MockClock) -> None:
    """4096 pings fit into one frame, and the library answers each one separately."""
    async with acted() as peer:
        await peer.send(data(1, bytes(32 * 1700), SYN))
        (stream,) = await peer.streams()
        connection = SimpleNamespace(yamux=peer.ours, get_remote_address=lambda: None)
        library = MuxedStream(stream, cast("Any", connection))
        reads = 0

        async def echo() -> None:
            nonlocal reads
            while True:
                await library.read(32)
                reads += 1

        await until_blocked(echo)
        assert reads == LIMITS.library_reads_at_once
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo)
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
        assert reads <= LIMITS.library_reads_at_once + 5 * LIMITS.library_reads_per_s + 1
        assert reads > LIMITS.library_reads_at_once + 4 * LIMITS.library_reads_per_s
