"""What a peer without a grant may do, and how much of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio

from codec.sign import Key
from swarm.transport.base import Lane, PeerKey, Unreachable
from swarm.transport.gate import Gate, GateRules
from swarm.transport.lanes import WAYS_ID
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.yamux import Limits

ANY = "/ip4/127.0.0.1/tcp/0"


class FakeConnection:
    def __init__(self, peer: int, host: str, *, dialed: bool = False) -> None:
        self.peer, self.host, self.is_initiator = bytes([peer]) * 32, host, dialed
        self.yamux = self
        self.widened: list[Limits] = []

    def get_remote_address(self) -> tuple[str, int]:
        return self.host, 1

    def widen(self, limits: Limits) -> None:
        self.widened.append(limits)


def fake(peer: int, host: str = "h", *, dialed: bool = False) -> Any:
    return cast("Any", FakeConnection(peer, host, dialed=dialed))


def test_strangers_are_few_and_few_from_one_address() -> None:
    gate = Gate(lambda peer: False, Limits(), GateRules(connections=4, per_address=2))
    first, second = fake(1), fake(2)
    assert gate.begin(first, 0)
    assert gate.begin(second, 0)
    assert not gate.begin(fake(3), 0)
    assert gate.begin(fake(4, "other"), 0)
    assert gate.begin(fake(5, "third"), 0)
    assert not gate.begin(fake(6, "fourth"), 0)
    assert gate.begin(fake(7, dialed=True), 0)  # we dialed it: it does not count
    gate.end(first)
    gate.end(first)  # twice is nothing
    assert gate.begin(fake(3), 0)


def test_a_host_with_many_ipv6_addresses_is_one_host() -> None:
    gate = Gate(lambda peer: False, Limits(), GateRules(per_address=2))
    first = fake(1, "2001:db8::1")
    assert gate.begin(first, 0)
    assert gate.begin(fake(2, "2001:db8::2"), 0)
    assert not gate.begin(fake(3, "2001:db8::3"), 0)
    assert gate.begin(fake(4, "2001:db8:0:1::1"), 0)
    gate.end(first)
    assert gate.begin(fake(5, "2001:db8::5"), 0)


def test_who_is_admitted_is_no_stranger_any_more() -> None:
    admitted: set[PeerKey] = set()
    full = Limits()
    gate = Gate(admitted.__contains__, full, GateRules(connections=1, stay_s=60))
    connection = fake(1)
    narrow = gate.limits(connection.peer, dialed=False)
    assert (narrow.max_inbound_streams, narrow.window_budget_bytes) == (6, 0)
    assert gate.limits(connection.peer, dialed=True) == full
    assert gate.begin(connection, 0)
    assert not gate.may(connection, "/meshsub/1.1.0")
    assert not gate.may(connection, WAYS_ID)
    assert gate.may(connection, "/swarm-node/control/1")
    assert gate.may(connection, "/ipfs/id/1.0.0")
    assert gate.review([connection], 60) == []
    assert gate.review([connection], 61) == [connection]
    admitted.add(connection.peer)
    assert gate.review([connection], 61) == []
    assert connection.yamux.widened == [full]
    assert gate.limits(connection.peer, dialed=False) == full
    assert gate.may(connection, "/meshsub/1.1.0")
    assert gate.begin(fake(2), 70)  # its place is free


def test_whom_we_relay_for_may_stay() -> None:
    gate = Gate(lambda peer: False, Limits(), None, lambda peer: True)
    connection = fake(1)
    assert gate.begin(connection, 0)
    assert gate.review([connection], 1000) == []


def test_whose_lease_is_over_is_a_stranger_again() -> None:
    admitted = {bytes([1]) * 32}
    gate = Gate(admitted.__contains__, Limits(), GateRules(connections=1, stay_s=60))
    member, dialed = fake(1), fake(2, dialed=True)
    assert gate.begin(member, 0)
    assert gate.review([member, dialed], 100) == []
    assert gate.may(member, "/meshsub/1.1.0")
    admitted.clear()
    assert gate.review([member, dialed], 115) == []
    assert not gate.may(member, "/meshsub/1.1.0")
    assert gate.review([member, dialed], 175) == []
    assert gate.review([member, dialed], 176) == [member]
    other = fake(3)
    assert gate.review([other], 176) == [other]  # there is room for one
    gate.end(member)
    assert gate.review([other], 177) == []


@asynccontextmanager
async def guarded(admitted: set[PeerKey], rules: GateRules) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """A stranger that has dialed a node."""
    node = Libp2pTransport(Key(b"n" * 32), [ANY], admits=admitted.__contains__, gate_rules=rules)
    stranger = Libp2pTransport(Key(b"s" * 32), [ANY])

    async def echo(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
        async for data in stream:
            await stream.send_all(data)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            addrs = await nursery.start(node.serve, echo)
            await nursery.start(stranger.serve, echo)
            await stranger.connect(node.key, addrs)
            yield node, stranger
            nursery.cancel_scope.cancel()


async def asks(stranger: Libp2pTransport, node: Libp2pTransport, protocol: str) -> bytes:
    connection = stranger._connections(node.key)[0]
    stream = await stranger.open_on(connection, protocol)
    await stream.send_all(b"\x01")
    return await stream.receive_some(1)


async def test_a_stranger_may_only_ask() -> None:
    admitted: set[PeerKey] = set()
    async with guarded(admitted, GateRules()) as (node, stranger):
        async with await stranger.open_stream(node.key, Lane.CONTROL) as stream:
            await stream.send_all(b"let me in")
            assert await stream.receive_some() == b"let me in"
        with pytest.raises(trio.BrokenResourceError):
            await asks(stranger, node, WAYS_ID)
        connection = node._connections(stranger.key)[0].yamux
        assert connection.limits.max_inbound_streams == 6
        assert connection.unread_bytes <= 6 * 262_144
        assert stranger.peers() == [node.key]

        admitted.add(stranger.key)
        assert await asks(stranger, node, WAYS_ID) == b""  # heard, though it knows no address to dial
        assert connection.limits == Limits()


async def test_a_stranger_opens_few_streams() -> None:
    async with guarded(set(), GateRules(streams=3)) as (node, stranger):
        streams = [await stranger.open_stream(node.key, Lane.CONTROL) for _ in range(8)]
        answered = 0
        for stream in streams:
            try:
                await stream.send_all(b"x")
                answered += await stream.receive_some() == b"x"
            except trio.BrokenResourceError:
                pass
        assert 1 <= answered <= 3


async def test_one_stranger_too_many_is_closed_at_once() -> None:
    async with guarded(set(), GateRules(per_address=1)) as (node, stranger):
        address = node.host.get_addrs()[0]  # type: ignore[union-attr]
        other = Libp2pTransport(Key(b"o" * 32), [ANY])

        async def ignore(*_: object) -> None: ...

        async with trio.open_nursery() as nursery:
            await nursery.start(other.serve, ignore)
            try:
                await other.connect(node.key, [str(address).partition("/p2p/")[0]])
                while other.peers():  # noqa: ASYNC110
                    await trio.sleep(0.01)
            except Unreachable:
                pass
            assert node.peers() == [stranger.key]
            nursery.cancel_scope.cancel()
