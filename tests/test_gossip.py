import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import trio
import trio.testing

from codec.sign import Key
from swarm.gossip import MAX_MESSAGE_BYTES, Announcer, Gossip, MemoryGossip
from swarm.transport.base import Lane, PeerKey, Transport, Unreachable
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.memory import Link, MemoryNetwork, MemoryTransport


async def idle(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
    await trio.sleep_forever()


def valid(data: bytes) -> bool:
    return not data.startswith(b"bad")


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.02)


class Member:
    def __init__(self, transport: Transport, announcer: Announcer) -> None:
        self.transport = transport
        self.announcer = announcer
        self.got: list[bytes] = []

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        await self.announcer.run(self.got.append, task_status=task_status)


def libp2p_member(number: int) -> Member:
    transport = Libp2pTransport(Key(bytes([number + 1]) * 32), ["/ip4/127.0.0.1/tcp/0"])
    return Member(transport, Gossip(transport, "/test", valid))


@asynccontextmanager
async def chain(count: int, make: Callable[[int], Member]) -> AsyncIterator[list[Member]]:
    """Members of which each knows the one before it."""
    members = [make(number) for number in range(count)]
    async with trio.open_nursery() as nursery:
        for index, member in enumerate(members):
            addrs = await nursery.start(member.transport.serve, idle)
            if index + 1 < count:
                next_ = members[index + 1]
                nursery.start_soon(_connect_when_serving, next_.transport, member.transport.key, addrs)
        await until(lambda: all(member.transport.peers() for member in members))
        for member in members:
            await nursery.start(member.run)
        yield members
        nursery.cancel_scope.cancel()


async def _connect_when_serving(transport: Transport, peer: PeerKey, addrs: list[str]) -> None:
    while not transport.peers():
        try:
            await transport.connect(peer, addrs)
        except Unreachable:
            await trio.sleep(0.05)


async def settle(members: list[Member]) -> None:
    """Until an announcement of the first reaches the last: the mesh stands."""
    number = 0
    while not members[-1].got:
        number += 1
        await members[0].announcer.publish(b"knock %d" % number)
        await trio.sleep(0.1)
    await trio.sleep(0.2)
    for member in members:
        member.got.clear()


@pytest.mark.parametrize("kind", ["libp2p", "memory"])
async def test_all_hear_once_and_nobody_hears_what_is_invalid(kind: str) -> None:
    network = MemoryNetwork(Link(delay_s=0.01))

    def memory_member(number: int) -> Member:
        transport = MemoryTransport(network, Key(bytes([number + 1]) * 32))
        return Member(transport, MemoryGossip(transport, "/test", valid))

    with trio.fail_after(20):
        async with chain(4, libp2p_member if kind == "libp2p" else memory_member) as members:
            await settle(members)
            await members[0].announcer.publish(b"news")
            await members[1].announcer.publish(b"bad")  # its own validator is not asked; its neighbours' are
            await members[3].announcer.publish(b"more")
            await members[0].announcer.publish(b"news")  # again: nobody hears it twice
            await until(lambda: all(len(member.got) == 2 for member in members[1:3]))
            await trio.sleep(0.3)
            assert [sorted(member.got) for member in members] == [
                [b"more"],
                [b"more", b"news"],
                [b"more", b"news"],
                [b"news"],
            ]


@pytest.mark.parametrize("size", [1, 1000, MAX_MESSAGE_BYTES])
async def test_sizes(size: int) -> None:
    with trio.fail_after(20):
        async with chain(2, libp2p_member) as members:
            await settle(members)
            data = os.urandom(size - 1) + b"!"
            await members[0].announcer.publish(data)
            await until(lambda: members[1].got == [data])
            with pytest.raises(ValueError, match="at most"):
                await members[0].announcer.publish(bytes(MAX_MESSAGE_BYTES + 1))


async def test_a_burst_is_not_thinned_out() -> None:
    with trio.fail_after(20):
        async with chain(3, libp2p_member) as members:
            await settle(members)
            sent = [b"%d" % number * 100 for number in range(300)]
            for data in sent:
                await members[0].announcer.publish(data)
            await until(lambda: len(members[2].got) == 300)
            assert sorted(members[2].got) == sorted(sent)


async def test_not_running() -> None:
    network = MemoryNetwork()
    transport = MemoryTransport(network, Key(bytes(32)))
    with pytest.raises(Unreachable, match="not gossiping"):
        await MemoryGossip(transport, "/test", valid).publish(b"x")
    with pytest.raises(Unreachable, match="not gossiping"):
        await libp2p_member(0).announcer.publish(b"x")
    with pytest.raises(Unreachable, match="that serves"):
        await libp2p_member(0).run()


async def test_after_gossip_ends_peers_still_connect() -> None:
    a, b = libp2p_member(0), libp2p_member(1)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            addrs = await nursery.start(a.transport.serve, idle)
            await nursery.start(b.transport.serve, idle)
            async with trio.open_nursery() as gossiping:
                await gossiping.start(a.run)
                await gossiping.start(b.run)
                gossiping.cancel_scope.cancel()
            await b.transport.connect(a.transport.key, addrs)
            assert a.transport.peers() == [b.transport.key]
            nursery.cancel_scope.cancel()
