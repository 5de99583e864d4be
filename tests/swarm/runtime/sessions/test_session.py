"""One session: messages, deadlines, and which of two crossing sessions stays."""

import tracemalloc
from pathlib import Path

import pytest
import trio
from bench_kit import ME, OTHER, PEER, Scripted, bench, ended, read
from runtime_kit import AUTHORITY, Log, here_and_now

from swarm.protocol.core.events import Close, Dial, Heard, PeerDown, PeerUp, PieceBad, Send
from swarm.protocol.core.wire import Detach, Pong, Work
from swarm.runtime import Manifests, Runtime, RuntimeLimits
from swarm.runtime.framing import frame_message
from swarm.store import Store
from swarm.transport.memory import Link, MemoryNetwork, MemoryTransport

# ---------------------------------------------------------------- control


async def test_messages_in_both_directions_arrive_in_any_fragmentation(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        sent = [Work(b"one"), Detach(3), Work(b"x" * 100_000)]
        data = b"".join(map(frame_message, sent))
        for at in range(0, len(data), 777):
            await stream.send_all(data[at : at + 777])
        await b.settle()
        assert [event.message for event in b.core.of(Heard)] == sent
        assert b.core.of(PeerUp) == [PeerUp(PEER.public, False, b.peer.address)]
        b.runtime.perform([Send(PEER.public, Detach(1))])
        assert await read(stream) == Detach(1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xff\xff\xff", "message: 4294967295 bytes"),
        (b"\0\0\0\0", "message: 0 bytes"),
        (b"\x03\0\0\0\x63\x91\x01", "protocol version"),
        (b"\x03\0\0\0\x01\xc1\xc1", "message:"),
    ],
    ids=["oversized", "empty", "of another protocol", "garbled"],
)
async def test_a_malformed_message_ends_the_session(
    tmp_path: Path, autojump_clock: object, data: bytes, why: str
) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        await stream.send_all(data)
        assert await ended(stream)
        await b.settle()
        (bad,) = b.core.of(PieceBad)
        assert why in bad.what
        assert isinstance(b.core.events[-1], PeerDown)
        again = await b.control()  # banned by the core's Close
        assert await ended(again)
        assert len(b.core.of(PeerUp)) == 1


async def test_half_a_message_has_a_deadline_and_silence_has_none(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        await b.settle(3600)
        assert b.core.of(PeerDown) == []
        await stream.send_all(b"\x09\0\0")
        await b.settle(b.runtime._limits.frame_deadline_s + 1)
        (down,) = b.core.of(PeerDown)
        assert down.why == "too slow"
        assert b.core.of(PieceBad) == []


@pytest.mark.parametrize(("messages", "size"), [(30, 100_000), (9_000, 1)])
async def test_a_peer_that_does_not_read_is_closed(
    tmp_path: Path, autojump_clock: object, messages: int, size: int
) -> None:
    limits = RuntimeLimits(control_queue_bytes=1 << 20)
    async with bench(tmp_path, limits) as b:
        await b.control()
        for _ in range(messages):
            b.runtime.perform([Send(PEER.public, Work(b"x" * size))])
        await b.settle()
        (down,) = b.core.of(PeerDown)
        assert down.why == "does not read its control stream"


async def test_a_peer_with_answers_to_read_is_not_read(tmp_path: Path, autojump_clock: object) -> None:
    """Regression: for each of ten members that sent hellos to a seed without reading, 4 MiB of answers waited."""
    async with bench(tmp_path, RuntimeLimits(unread_messages=3)) as b:
        stream = await b.control()
        for _ in range(60):  # more than the connection buffers
            b.runtime.perform([Send(PEER.public, Work(b"x" * 20_000))])
        (session,) = b.runtime.peers
        assert session._queued_messages > 3
        for n in range(3):
            await stream.send_all(frame_message(Work(bytes([n]))))
            await b.settle()
        assert [event.message for event in b.core.of(Heard)] == [Work(b"\0")]
        while session._queued_messages > 3:
            await stream.receive_some(1 << 16)
            await b.settle()
        assert [event.message for event in b.core.of(Heard)] == [Work(bytes([n])) for n in range(3)]


async def test_a_peer_that_sends_much_is_read_at_a_limited_rate(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path, RuntimeLimits(messages_s=10.0, messages_at_once=20.0)) as b:
        stream = await b.control()
        await stream.send_all(b"".join(frame_message(Work(bytes([n]))) for n in range(60)))
        await b.settle(0.05)
        assert len(b.core.of(Heard)) == 21
        await b.settle(2.0)
        assert 35 <= len(b.core.of(Heard)) <= 45
        await b.settle(2.0)
        assert [event.message for event in b.core.of(Heard)] == [Work(bytes([n])) for n in range(60)]


async def test_unread_short_answers_take_no_more_memory_than_is_counted(tmp_path: Path, autojump_clock: object) -> None:
    """Regression: for a peer that pings without reading, the seed held an object of 50 bytes for each answer of 10."""
    async with bench(tmp_path) as b:
        await b.control()
        tracemalloc.start()
        try:
            for nonce in range(8_000):
                b.runtime.perform([Send(PEER.public, Pong(nonce))])
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        waiting_bytes = b.runtime.peers._sessions[PEER.public]._queued_bytes
        assert waiting_bytes > 50_000
        assert held_bytes < 3 * waiting_bytes


async def test_a_frozen_peer_is_found_by_the_write_deadline(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        await b.control()
        for _ in range(8):
            b.runtime.perform([Send(PEER.public, Work(b"x" * 100_000))])
        await b.settle(b.runtime._limits.write_deadline_s + 1)
        assert [event.why for event in b.core.of(PeerDown)] == ["too slow"]


async def test_close_flushes_queued_messages(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        stream = await b.control()
        b.runtime.perform([Send(PEER.public, Detach(1)), Close(PEER.public, "enough"), Send(PEER.public, Detach(2))])
        assert await read(stream) == Detach(1)
        assert await ended(stream)
        await b.settle()
        assert b.core.of(PeerDown) == [PeerDown(PEER.public, why="enough")]


async def test_a_failed_dial_is_reported(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        b.runtime.perform([Dial(OTHER.public, ("/memory/nowhere",))])
        await b.settle()
        (down,) = b.core.of(PeerDown)
        assert down.dial_failed
        assert "does not answer" in down.why


# ---------------------------------------------------------------- crossing


@pytest.mark.parametrize("delay_s", [0.0, 0.05])
async def test_when_both_dial_one_session_stays(tmp_path: Path, autojump_clock: object, delay_s: float) -> None:
    network = MemoryNetwork(Link(delay_s=delay_s))
    cores, runtimes, transports = [], [], []
    async with trio.open_nursery() as nursery:
        for n, owner in enumerate((ME, PEER)):
            transport, core = MemoryTransport(network, owner), Scripted()
            store = Store(tmp_path / str(n), AUTHORITY.public)
            manifests = Manifests(AUTHORITY.public)
            runtime = Runtime(core, transport, store, manifests, Log(), run_sync=here_and_now)
            await nursery.start(runtime.run)
            cores.append(core)
            runtimes.append(runtime)
            transports.append(transport)
        for n in (0, 1):
            other = transports[1 - n]
            runtimes[n].perform([Dial(other.key, (other.address,))])
        await trio.sleep(1)
        for n in (0, 1):
            up, down = len(cores[n].of(PeerUp)), len(cores[n].of(PeerDown))
            assert up - down == 1
            assert len(list(runtimes[n].peers)) == 1
        dialers = [next(iter(runtime.peers)).dialed for runtime in runtimes]
        assert sorted(dialers) == [False, True]
        assert dialers[0] == (ME.public < PEER.public)
        for n in (0, 1):
            runtimes[n].perform([Send(transports[1 - n].key, Work(bytes([n])))])
        await trio.sleep(1)
        assert [event.message for event in cores[0].of(Heard)] == [Work(b"\1")]
        assert [event.message for event in cores[1].of(Heard)] == [Work(b"\0")]
        nursery.cancel_scope.cancel()


async def test_a_peer_that_returns_replaces_its_old_session(tmp_path: Path, autojump_clock: object) -> None:
    async with bench(tmp_path) as b:
        old = await b.control()
        new = await b.control()
        assert await ended(old)
        await new.send_all(frame_message(Work(b"back")))
        await b.settle()
        assert [type(event) for event in b.core.events] == [PeerUp, PeerDown, PeerUp, Heard]


async def test_nothing_is_sent_in_a_session_before_the_core_knows_it(tmp_path: Path, autojump_clock: object) -> None:
    """What the core decides while the end of the old session is queued came before the hello of the new one, and the
    peer banned its sender."""
    async with bench(tmp_path) as b:
        stream = await b.control()
        session = b.runtime.peers.get(PEER.public)
        assert session is not None
        assert session.known
        session.known = False
        b.runtime.perform([Send(PEER.public, Work(b"for the old session"))])
        b.runtime.check_event(PeerUp(PEER.public, False))
        b.runtime.perform([Send(PEER.public, Work(b"for this one"))])
        assert await stream.receive_some(1 << 10) == frame_message(Work(b"for this one"))


async def test_large_messages_of_all_peers_are_decoded_two_at_a_time(tmp_path: Path, autojump_clock: object) -> None:
    """Regression: ten members that each sent a list of 65,536 chunks made the seed hold 120 MiB of decoded lists."""
    async with bench(tmp_path) as b:
        stream = await b.control()
        large = b.runtime.peers._large
        large.acquire_on_behalf_of_nowait("one")
        large.acquire_on_behalf_of_nowait("another")
        await stream.send_all(frame_message(Work(b"x" * (80 << 10))))
        await b.settle()
        assert b.core.of(Heard) == []
        large.release_on_behalf_of("one")
        await b.settle()
        assert [len(event.message.body) for event in b.core.of(Heard)] == [80 << 10]  # type: ignore[union-attr]
        assert large.borrowed_tokens == 1
