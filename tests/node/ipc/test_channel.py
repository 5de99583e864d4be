"""Frames and descriptors over real Unix sockets: split, oversized, altered, cancelled. No descriptor ever leaks."""

import os
import socket
import struct
import threading
from pathlib import Path

import msgspec
import pytest
import trio

from codec.errors import PeerError, UsageError
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import Channel, ChannelClosed, ChannelTimeout, connect
from node.ipc.framing import MAX_BODY_BYTES, FrameReader, encode_frame
from swarm.guard import Source


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    data: bytes = b""


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    n: int


Both = Ping | Pong


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def a_file(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    a, b = Channel(left, Both), Channel(right, Both)
    yield a, b
    a.close()
    b.close()


def test_messages_and_descriptors_arrive_in_order(pair):
    a, b = pair
    before = open_fds()
    first, second = a_file(b"one"), a_file(b"two")
    a.send(Pong(1))
    a.send(Ping(b"x"), [first, second])
    a.send(Pong(2))
    a.send(Ping(), [second])
    os.close(first)
    os.close(second)
    got = [b.recv(5) for _ in range(4)]
    assert [message for message, _ in got] == [Pong(1), Ping(b"x"), Pong(2), Ping()]
    assert [[os.pread(fd, 10, 0) for fd in fds] for _, fds in got] == [[], [b"one", b"two"], [], [b"two"]]
    for _, fds in got:
        for fd in fds:
            assert not os.get_inheritable(fd)
            os.close(fd)
    assert open_fds() == before


def test_large_messages_cross_while_the_reader_is_slow(pair):
    a, b = pair
    data = os.urandom(3 << 20)
    sender = threading.Thread(target=a.send, args=(Ping(data),))
    sender.start()
    with pytest.raises(ChannelTimeout):
        Channel.recv(b, 0)
    assert b.recv(10)[0].data == data
    sender.join()


def test_a_receive_timeout_loses_nothing():
    left, right = socket.socketpair()
    fd = a_file(b"kept")
    frame = encode_frame(Ping(b"half"), [fd])
    with Channel(right, Both) as b:
        socket.send_fds(left, [frame[:7]], [fd])
        with pytest.raises(ChannelTimeout):
            b.recv(0.01)
        left.sendall(frame[7:])
        message, fds = b.recv(5)
        assert message == Ping(b"half")
        assert os.pread(fds[0], 10, 0) == b"kept"
        os.close(fds[0])
    os.close(fd)
    left.close()


def test_send_times_out_and_closes_when_the_other_end_does_not_read(pair):
    a, b = pair
    with pytest.raises(ChannelTimeout):
        a.send(Ping(bytes(8 << 20)), timeout_s=0.05)
    with pytest.raises(ChannelClosed):
        a.send(Pong(1))
    with pytest.raises(ChannelClosed):  # half a frame and then the end
        b.recv(5)


def test_closing_wakes_a_thread_that_waits(pair):
    a, _ = pair
    errors: list[Exception] = []

    def wait() -> None:
        try:
            a.recv(30)
        except ChannelClosed as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    a.close()
    thread.join(5)
    assert len(errors) == 1
    a.close()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<IB", MAX_BODY_BYTES + 1, 0),
        struct.pack("<IB", 1, 200),
        struct.pack("<IB", 1, 2) + b"\x00",  # announces two descriptors, one came
        struct.pack("<IB", 3, 0) + b"\xff\xff\xff",
        struct.pack("<IB", 4, 0) + msgspec.msgpack.encode("pin"),
        encode_frame(Pong(1)).replace(b"pong", b"gong"),
        encode_frame(Pong(1)).replace(b"\x01", b"\xc0"),
    ],
)
def test_an_invalid_frame_is_a_peer_error_and_leaks_no_descriptor(frame):
    before = open_fds()
    left, right = socket.socketpair()
    fd = a_file(b"")
    channel = Channel(right, Both)
    socket.send_fds(left, [encode_frame(Pong(7))], [fd])  # a descriptor that no message claims
    left.sendall(frame)
    assert channel.recv(5) == (Pong(7), [])
    with pytest.raises(PeerError):
        channel.recv(5)
    with pytest.raises(ChannelClosed):
        channel.recv(5)
    left.close()
    os.close(fd)
    assert open_fds() == before


def test_too_many_descriptors_are_refused_and_closed():
    before = open_fds()
    left, right = socket.socketpair()
    fd = a_file(b"")
    channel = Channel(right, Both)
    socket.send_fds(left, [encode_frame(Ping())], [fd] * 40)
    with pytest.raises(PeerError, match="descriptors"):
        channel.recv(5)
    left.close()
    os.close(fd)
    assert open_fds() == before


def test_frames_take_bytes_one_at_a_time():
    frames = FrameReader(Both)
    stream = encode_frame(Ping(b"abc")) + encode_frame(Pong(3))
    seen = []
    for i in range(len(stream)):
        frames.feed(stream[i : i + 1], [], 0)
        if (found := frames.next_message()) is not None:
            seen.append(found)
    assert seen == [(Ping(b"abc"), []), (Pong(3), [])]


def test_sending_too_large_a_message_is_a_value_error():
    with pytest.raises(ValueError, match="Ping"):
        encode_frame(Ping(bytes(MAX_BODY_BYTES)))
    with pytest.raises(ValueError, match="descriptors"):
        encode_frame(Ping(), range(5))


async def echo(channel: AsyncChannel) -> None:
    while True:
        message, fds = await channel.recv()
        await channel.send(message, fds)
        for fd in fds:
            os.close(fd)


async def test_serve_socket_answers_synchronous_clients_and_cleans_up(tmp_path: Path):
    path = tmp_path / "home" / "s.sock"
    before = open_fds()

    def client() -> None:
        with connect(path, Both) as channel:
            fd = a_file(b"there and back")
            channel.send(Ping(b"hello"), [fd])
            message, fds = channel.recv(5)
            assert message == Ping(b"hello")
            assert os.pread(fds[0], 20, 0) == b"there and back"
            os.close(fd)
            os.close(fds[0])

    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_socket(path, echo, receives=Both, source=Source.TRAINER, task_status=task_status)
        )
        assert path.stat().st_mode & 0o777 == 0o600
        await trio.to_thread.run_sync(client)
        await trio.to_thread.run_sync(client)
        nursery.cancel_scope.cancel()
    assert not path.exists()
    assert open_fds() <= before + 4  # trio's thread cache and wake-up pipe
    with pytest.raises(ChannelClosed, match="nobody answers"):
        connect(path, Both)


async def test_an_invalid_frame_ends_one_connection_only(tmp_path: Path):
    path = tmp_path / "s.sock"
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_socket(path, echo, receives=Both, source=Source.TRAINER, task_status=task_status)
        )
        async with await trio.open_unix_socket(str(path)) as bad, await trio.open_unix_socket(str(path)) as good:
            await bad.send_all(b"\xff" * 64)
            with trio.fail_after(5):
                assert await bad.receive_some() == b""
                await good.send_all(encode_frame(Pong(1)))
                assert await good.receive_some() == encode_frame(Pong(1))
        nursery.cancel_scope.cancel()


async def test_a_cancelled_receive_loses_nothing():
    left, right = socket.socketpair()
    channel = AsyncChannel.adopt(right, Both)
    frame = encode_frame(Ping(b"half"))
    left.sendall(frame[:9])
    with trio.move_on_after(0.01):
        await channel.recv()
    left.sendall(frame[9:])
    assert await channel.recv() == (Ping(b"half"), [])
    left.close()
    channel.close()


async def test_a_send_cancelled_halfway_closes():
    left, right = socket.socketpair()
    channel = AsyncChannel.adopt(right, Both)
    with trio.move_on_after(0.5):  # encoding it takes a while on a busy machine
        await channel.send(Ping(bytes(8 << 20)))
    with pytest.raises(ChannelClosed):
        await channel.send(Pong(1))
    left.close()


async def test_closing_wakes_a_waiting_task():
    left, right = socket.socketpair()
    channel = AsyncChannel.adopt(right, Both)
    async with trio.open_nursery() as nursery:

        async def wait() -> None:
            with pytest.raises(ChannelClosed):
                await channel.recv()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        channel.close()
    left.close()


async def test_a_stale_socket_is_replaced_and_a_served_one_is_not(tmp_path: Path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    async with trio.open_nursery() as nursery:
        await nursery.start(
            lambda task_status: serve_socket(path, echo, receives=Both, source=Source.TRAINER, task_status=task_status)
        )
        with pytest.raises(UsageError, match="already serves"):
            await serve_socket(path, echo, receives=Both, source=Source.TRAINER)
        await trio.to_thread.run_sync(lambda: connect(path, Both).close())
        nursery.cancel_scope.cancel()


async def test_paths_that_are_too_long_or_not_sockets_are_refused(tmp_path: Path):
    long = tmp_path / ("x" * 120)
    with pytest.raises(UsageError, match="SWARM_HOME"):
        await serve_socket(long, echo, receives=Both, source=Source.TRAINER)
    with pytest.raises(UsageError, match="SWARM_HOME"):
        connect(long, Both)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="not a socket"):
        await serve_socket(tmp_path / "file", echo, receives=Both, source=Source.TRAINER)
    assert (tmp_path / "file").read_text() == "mine"
