"""Many connections, from one peer or from many: which are refused, and that no other peer suffers."""

import time
from contextlib import suppress

import pytest
import trio
from libp2p_kit import echo, transport, two

from swarm.transport.base import Lane, Unreachable


async def test_one_peer_makes_a_limited_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.transport.libp2p.MAX_CONNECTIONS_A_PEER", 3)
    async with two() as (a, b, addrs):
        for _ in range(6):
            with suppress(Unreachable, trio.BrokenResourceError):  # the connection is served or closed
                stream = await a.open_on(await a._dial(b.key, addrs, Lane.BULK), "/ipfs/ping/1.0.0")
                await stream.send_all(bytes(32))
                await stream.receive_some()
            assert len(b._connections(a.key)) <= 3
        assert len(b._connections(a.key)) == 3
        while len(a._connections(b.key)) > 3:  # noqa: ASYNC110
            await trio.sleep(0.01)
        async with await a.open_stream(b.key, Lane.CONTROL) as control:
            await control.send_all(b"still served")
            assert await control.receive_some() == b"still served"


async def test_all_peers_together_make_a_limited_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async with two() as (a, b, _):  # before the limit is lowered
        monkeypatch.setattr("swarm.transport.host.MAX_CONNECTIONS", 2)
        crowded = transport(3)
        others = [transport(seed) for seed in range(4, 8)]
        async with trio.open_nursery() as nursery:
            addrs = await nursery.start(crowded.serve, echo)
            for other in others:
                await nursery.start(other.serve, echo)
                with suppress(Unreachable):
                    await other.connect(crowded.key, addrs)
            while sum(bool(other.peers()) for other in others) > 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert len(crowded.peers()) == 2
            nursery.cancel_scope.cancel()
        assert a.peers() == [b.key]


async def test_the_task_of_an_inbound_connection_ends_with_it() -> None:
    """Otherwise a node that runs for long would accept no more connections."""
    async with two() as (a, b, addrs):
        tasks = trio.lowlevel.current_statistics().tasks_living
        for _ in range(5):
            await a.disconnect(b.key)
            await trio.sleep(0.15)
            await a.connect(b.key, addrs)
        await trio.sleep(0.15)
        assert trio.lowlevel.current_statistics().tasks_living <= tasks + 3


async def test_many_transports_and_a_quick_end() -> None:
    transports = [transport(seed) for seed in range(10, 18)]
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            addrs = {each.key: await nursery.start(each.serve, echo) for each in transports}
            async with trio.open_nursery() as dialing:
                for index, near in enumerate(transports):
                    for far in transports[:index]:
                        dialing.start_soon(near.connect, far.key, addrs[far.key])
            for near in transports:
                for peer in near.peers():
                    async with await near.open_stream(peer, Lane.CONTROL) as stream:
                        await stream.send_all(b"x")
                        assert await stream.receive_some() == b"x"
            start_s = time.perf_counter()
            nursery.cancel_scope.cancel()
    assert time.perf_counter() - start_s < 5


async def test_invalid_bytes_from_strangers_do_no_harm() -> None:
    async with two() as (a, b, addrs):
        port = int(addrs[0].rsplit("/", 1)[1])
        hello = b"\x13/multistream/1.0.0\n"
        for words in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff" * 100,
            hello + b"\xff\xff\xff\xff\xff\xff\xff\x7f",
            hello + b"\x04\xff\xfe\xfd\n",
            hello + b"\x0b/tls/1.0.0\n" + bytes(500),
            hello + b"\x07/noise\n" + b"\xff" * 70_000,
            hello + b"\x02x\n" * 50,
            b"",
        ):
            stranger = await trio.open_tcp_stream("127.0.0.1", port)
            async with stranger:
                try:
                    await stranger.send_all(words)
                    await stranger.send_eof()
                    while await stranger.receive_some():
                        pass
                except trio.BrokenResourceError:
                    pass
        async with await a.open_stream(b.key, Lane.CONTROL) as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"
