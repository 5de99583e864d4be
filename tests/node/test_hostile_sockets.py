"""Local processes that send invalid bytes: every end of a local socket refuses them, closes their descriptors and
continues."""

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import PeerError, UsageError
from node.engines.vllm.plugin.swarm_vllm import channel as plugin
from node.ipc.async_channel import AsyncChannel, serve_socket
from node.ipc.channel import Channel, ChannelClosed
from node.ipc.framing import MAX_BODY_BYTES, MAX_FDS, encode_frame
from node.status import query
from node.status.schema import SeedStatus
from swarm import guard
from swarm.guard import Source


class Word(msgspec.Struct, frozen=True, tag="word"):
    text: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    why: str


def frame(body: bytes, fds: int = 0) -> bytes:
    return struct.pack("<IB", len(body), fds) + body


GOOD = encode_frame(Word("hello"))
RUBBISH = {
    "a frame of 4 GiB": b"\xff" * 64,
    "one byte too many": struct.pack("<IB", MAX_BODY_BYTES + 1, 0),
    "five descriptors": struct.pack("<IB", 5, MAX_FDS + 1),
    "descriptors that never arrived": frame(GOOD[5:], 2),
    "no utf-8": frame(GOOD[5:].replace(b"hello", b"he\xff\xfeo")),
    "nested": frame(b"\x91" * 200_000),
    "another message": encode_frame(Refused("x")),
    "nothing": frame(b""),
    "two in one": frame(GOOD[5:] + GOOD[5:]),
}


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def by_thread(sock: socket.socket) -> tuple[Any, list[int]]:
    with Channel(sock, Word) as channel:
        return channel.recv(5.0)


def by_task(sock: socket.socket) -> tuple[Any, list[int]]:
    async def main() -> tuple[Any, list[int]]:
        channel = AsyncChannel.adopt(sock, Word)
        try:
            with trio.fail_after(5):
                return await channel.recv()
        finally:
            channel.close()

    return trio.run(main)


def by_plugin(sock: socket.socket) -> tuple[Any, list[int]]:
    channel = plugin.Channel(sock, Word)
    try:
        return channel.recv()
    finally:
        channel.close()


READERS = [by_thread, by_task, by_plugin]
Reader = Callable[[socket.socket], tuple[Any, list[int]]]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("what", RUBBISH)
def test_invalid_frames_are_refused(reader: Reader, what: str):
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(RUBBISH[what])
        with pytest.raises((PeerError, plugin.Closed)):
            reader(ours)


@pytest.mark.parametrize("reader", READERS)
def test_a_connection_may_end_at_any_byte(reader: Reader):
    for cut in range(len(GOOD)):
        ours, theirs = socket.socketpair()
        theirs.sendall(GOOD[:cut])
        theirs.close()
        with pytest.raises((ChannelClosed, plugin.Closed)):
            reader(ours)


@pytest.mark.parametrize("reader", READERS)
def test_unannounced_descriptors_are_closed(reader: Reader):
    """Four come with each byte of a frame that announces none; a process may have only about a thousand."""
    before = open_fds()
    ours, theirs = socket.socketpair()
    large = frame(msgspec.msgpack.encode(Word("x" * 4000)))
    with theirs, open(os.devnull) as file:
        for at in range(100):
            socket.send_fds(theirs, [large[at : at + 1]], [file.fileno()] * MAX_FDS)
        with pytest.raises((PeerError, plugin.Closed)):
            reader(ours)
    assert open_fds() <= before


@given(st.binary(max_size=80) | st.binary(max_size=40).map(frame))
def test_any_bytes_give_a_message_or_a_known_error(data: bytes):
    for reader in (by_thread, by_plugin):
        ours, theirs = socket.socketpair()
        theirs.sendall(data)
        theirs.close()
        try:
            message, fds = reader(ours)
            assert isinstance(message, Word)
            assert fds == []
        except (PeerError, ChannelClosed, plugin.Closed):
            pass


# ---------------------------------------------------------------- servers


async def say_hello(channel: AsyncChannel) -> None:
    while True:
        message, _ = await channel.recv()
        if message.text == "bug":
            raise ZeroDivisionError
        if message.text == "usage":
            raise UsageError("the disk is full")
        await channel.send(message)


async def served(nursery: trio.Nursery, path: Path, **options: Any) -> None:
    await nursery.start(
        lambda task_status: serve_socket(
            path, say_hello, receives=Word, source=Source.TRAINER, farewell=Refused, task_status=task_status, **options
        )
    )


async def test_a_bug_that_one_process_causes_ends_only_its_connection(tmp_path, monkeypatch):
    path, before = tmp_path / "s.sock", guard.bugs[Source.TRAINER]
    monkeypatch.delenv("SWARM_STRICT")
    async with trio.open_nursery() as nursery:
        await served(nursery, path)
        async with await trio.open_unix_socket(str(path)) as bad, await trio.open_unix_socket(str(path)) as good:
            await bad.send_all(encode_frame(Word("bug")))
            answer_bytes = b"".join([part async for part in bad])
            assert b"bug of swarm-node" in answer_bytes
            assert guard.bugs[Source.TRAINER] == before + 1
            await good.send_all(GOOD)
            assert await good.receive_some() == GOOD
        nursery.cancel_scope.cancel()


async def test_usage_errors_and_strict_bugs_propagate(tmp_path):
    for word, kind in (("usage", UsageError), ("bug", ZeroDivisionError)):
        path = tmp_path / f"{word}.sock"
        with pytest.RaisesGroup(kind, flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                await served(nursery, path)
                stream = await trio.open_unix_socket(str(path))
                await stream.send_all(encode_frame(Word(word)))
                await trio.sleep(5)


async def test_silent_connections_count_but_only_until_they_are_closed(tmp_path):
    path = tmp_path / "s.sock"
    async with trio.open_nursery() as nursery:
        await served(nursery, path, max_connections=3)
        silent = [await trio.open_unix_socket(str(path)) for _ in range(3)]
        await trio.testing.wait_all_tasks_blocked()
        late = await trio.open_unix_socket(str(path))
        with trio.fail_after(5):
            assert await late.receive_some() == b""
        await silent[0].aclose()
        await trio.testing.wait_all_tasks_blocked(0.01)
        again = await trio.open_unix_socket(str(path))
        with trio.fail_after(5):
            await again.send_all(GOOD)
            assert await again.receive_some() == GOOD
        for stream in (*silent, late, again):
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_the_status_socket_disconnects_a_silent_client(tmp_path, autojump_clock):
    autojump_clock.autojump_threshold = 0.05
    async with trio.open_nursery() as nursery:
        await nursery.start(lambda task_status: query.serve(tmp_path, SeedStatus, task_status=task_status))
        silent = await trio.open_unix_socket(str(tmp_path / query.SOCKET_NAME))
        began = trio.current_time()
        assert await silent.receive_some() == b""
        assert trio.current_time() - began == pytest.approx(query.ASK_WITHIN_S, abs=1.0)
        asking = await trio.open_unix_socket(str(tmp_path / query.SOCKET_NAME))
        await asking.send_all(frame(b"\xff\xff"))
        assert await asking.receive_some() == b""
        nursery.cancel_scope.cancel()
