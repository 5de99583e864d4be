import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

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


def libp2p_member(number: int, validate: Callable[[bytes], bool] = valid, **options: object) -> Member:
    transport = Libp2pTransport(Key(bytes([number + 1]) * 32), ["/ip4/127.0.0.1/tcp/0"], **options)  # type: ignore[arg-type]
    return Member(transport, Gossip(transport, "/test", validate))


def memory_member(network: MemoryNetwork, number: int, validate: Callable[[bytes], bool] = valid) -> Member:
    transport = MemoryTransport(network, Key(bytes([number + 1]) * 32))
    return Member(transport, MemoryGossip(transport, "/test", validate))


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


async def reaches(near: Member, far: Member) -> None:
    """Until something that `near` says now gets to `far`."""
    knock, number = os.urandom(8), 0
    while not any(text.startswith(knock) for text in far.got):
        number += 1
        await near.announcer.publish(b"%s %d" % (knock, number))
        await trio.sleep(0.1)


async def settle(members: list[Member]) -> None:
    """Until an announcement of the first reaches the last: the mesh stands."""
    await reaches(members[0], members[-1])
    await trio.sleep(0.2)
    for member in members:
        member.got.clear()


@pytest.mark.parametrize("kind", ["libp2p", "memory"])
async def test_all_hear_once_and_nobody_hears_what_is_invalid(kind: str) -> None:
    in_memory = partial(memory_member, MemoryNetwork(Link(delay_s=0.01)))
    with trio.fail_after(20):
        async with chain(4, libp2p_member if kind == "libp2p" else in_memory) as members:
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
            assert all(member.announcer.has_seen(b"news") for member in members)  # so that nobody says it again
            assert not any(member.announcer.has_seen(b"bad") for member in members[2:])


@pytest.mark.parametrize("kind", ["libp2p", "memory"])
async def test_what_is_invalid_goes_no_further(kind: str) -> None:
    """To one who would believe it: the validator of whoever stands between is asked before anything is passed on."""
    make = libp2p_member if kind == "libp2p" else partial(memory_member, MemoryNetwork())

    def member(number: int) -> Member:
        return make(number, valid if number == 1 else bool)

    with trio.fail_after(20):
        async with chain(3, member) as members:
            await settle(members)
            for text in (b"bad news", b"news", b"bad end", b"end"):
                await members[0].announcer.publish(text)
            await until(lambda: b"end" in members[2].got and b"news" in members[2].got)
            assert {text for member in members for text in member.got} == {b"news", b"end"}


async def test_what_is_too_long_is_not_heard_and_others_talk_on() -> None:
    """From a neighbour who keeps to no limits, with a validator that would take anything."""
    with trio.fail_after(30):
        async with chain(3, partial(libp2p_member, validate=bool)) as members:
            await settle(members)
            liar = members[0].announcer
            assert isinstance(liar, Gossip)
            assert liar._pubsub is not None
            await liar._pubsub.publish("/test", bytes(MAX_MESSAGE_BYTES + 1))
            await reaches(members[0], members[2])
            await liar._pubsub.publish("/test", bytes(5 * MAX_MESSAGE_BYTES))  # over a frame of GossipSub, too
            for near, far in (members[1:], members[:0:-1]):  # the liar may have put itself out
                await reaches(near, far)
            assert max(len(text) for member in members for text in member.got) < 100


async def test_without_a_grant_there_is_no_gossip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.gossip._GREET_S", 0.1)
    granted: set[PeerKey] = set()
    member, stranger = libp2p_member(0, admits=granted.__contains__), libp2p_member(1)
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            for each in (member, stranger):
                addrs = await nursery.start(each.transport.serve, idle)
                await nursery.start(each.run)
            await member.transport.connect(stranger.transport.key, addrs)
            await settle([member, stranger])  # whom we dialed is in it
            await member.transport.disconnect(stranger.transport.key)
            await until(lambda: not stranger.transport.peers())
            addrs = [str(address) for address in member.transport.host.get_addrs()]  # type: ignore[attr-defined]
            await stranger.transport.connect(member.transport.key, [addrs[0].partition("/p2p/")[0]])
            for turn in range(10):  # through many greetings
                await member.announcer.publish(b"for members %d" % turn)
                await stranger.announcer.publish(b"from a stranger %d" % turn)
                await trio.sleep(0.1)
            assert member.got == [] == stranger.got
            granted.add(stranger.transport.key)
            await settle([member, stranger])
            nursery.cancel_scope.cancel()


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
