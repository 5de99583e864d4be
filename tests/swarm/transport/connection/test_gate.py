"""What a peer without a grant may do, and for how long."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio

from codec.sign import Key
from swarm.transport.base import Lane, PeerKey
from swarm.transport.connection.gate import Gate, GateRules
from swarm.transport.lanes import TARGET_CONNECTIONS_ID
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import PeerPolicy, TransportRules
from swarm.transport.yamux import YamuxLimits

ANY = "/ip4/127.0.0.1/tcp/0"


class FakeConnection:
    def __init__(self, peer: int, host: str, *, dialed: bool = False) -> None:
        self.peer, self.host, self.is_initiator = bytes([peer]) * 32, host, dialed
        self.yamux = self
        self.widened: list[YamuxLimits] = []

    def get_remote_address(self) -> tuple[str, int]:
        return self.host, 1

    def widen(self, limits: YamuxLimits) -> None:
        self.widened.append(limits)


def fake(peer: int, host: str = "h", *, dialed: bool = False) -> Any:
    return cast("Any", FakeConnection(peer, host, dialed=dialed))


NOBODY = frozenset[PeerKey]().__contains__


def test_the_oldest_of_an_address_makes_room_for_its_next() -> None:
    gate = Gate(NOBODY, YamuxLimits(), GateRules(connections=9, per_address=2))
    first, second, third = (fake(peer) for peer in (1, 2, 3))
    assert gate.add_connection(first, 0) == []
    assert gate.add_connection(second, 1) == []
    assert gate.add_connection(third, 2) == [first]
    assert not gate.may_open(first, TARGET_CONNECTIONS_ID)  # while it is being closed
    assert gate.add_connection(fake(4), 3) == [second]
    gate.remove_connection(second)  # repeated: no effect
    assert gate.add_connection(fake(5, dialed=True), 3) == []  # we dialed it: it does not count


def test_the_address_that_has_most_makes_room_for_others() -> None:
    gate = Gate(NOBODY, YamuxLimits(), GateRules(connections=4, per_address=3))
    many = [fake(peer, "many") for peer in (1, 2, 3)]
    few = [fake(4, "few")]
    for now_s, each in enumerate([*few, *many]):
        assert gate.add_connection(each, now_s) == []
    assert gate.add_connection(fake(5, "new"), 5) == [many[0]]
    assert gate.add_connection(fake(6, "newer"), 6) == [many[1]]
    assert gate.add_connection(fake(7, "newest"), 7) == few  # each address has one; the oldest makes room


def test_a_peer_that_held_a_lease_is_closed_after_peers_that_never_did() -> None:
    held = {fake(1).peer}
    gate = Gate(held.__contains__, YamuxLimits(), GateRules(connections=2))
    left, stranger = fake(1), fake(2)
    gate.add_connection(left, 0)
    held.clear()
    gate.review([left], 1)
    gate.add_connection(stranger, 2)
    assert gate.add_connection(fake(3), 3) == [stranger]


def test_a_newcomer_amid_a_crowd_has_its_time() -> None:
    """Strangers from a thousand addresses come as fast as handshakes allow; each newcomer has at least two seconds."""
    gate = Gate(NOBODY, YamuxLimits(), GateRules())
    newcomer = None
    for number in range(1110):
        now_s = number / 111
        gate.overdue(now_s)
        gone = gate.add_connection(fake(number % 256, f"10.0.{number >> 8}.{number & 255}"), now_s)
        assert newcomer not in gone or now_s >= 7
        if number == 555:
            newcomer = fake(1, "192.0.2.1")
            gate.add_connection(newcomer, now_s)
    assert len(gate._strangers) == 256


def test_a_host_with_many_ipv6_addresses_is_one_host() -> None:
    gate = Gate(NOBODY, YamuxLimits(), GateRules(per_address=2))
    first, second = fake(1, "2001:db8::1"), fake(2, "2001:db8::2")
    assert gate.add_connection(first, 0) == []
    assert gate.add_connection(second, 0) == []
    assert gate.add_connection(fake(4, "2001:db8:0:1::1"), 0) == []
    assert gate.add_connection(fake(3, "2001:db8::3"), 0) == [first]


def test_three_seconds_to_show_a_ticket_and_a_minute_after_a_lease() -> None:
    held = {fake(2).peer}
    gate = Gate(held.__contains__, YamuxLimits(), GateRules())
    silent, left = fake(1), fake(2)
    for each in (silent, left):
        assert gate.add_connection(each, 0) == []
    held.clear()
    assert gate.review([silent, left], 1) == []
    assert gate.overdue(3) == []
    assert gate.overdue(3.1) == [silent]
    gate.remove_connection(silent)
    assert gate.overdue(61) == []
    assert gate.overdue(61.1) == [left]


def test_an_admitted_peer_is_not_a_stranger_any_more() -> None:
    admitted: set[PeerKey] = set()
    full = YamuxLimits()
    gate = Gate(admitted.__contains__, full, GateRules(connections=1))
    connection = fake(1)
    narrow = gate.limits(connection.peer, dialed=False)
    assert (narrow.max_inbound_streams, narrow.window_budget_bytes) == (6, 0)
    assert gate.limits(connection.peer, dialed=True) == full
    assert gate.add_connection(connection, 0) == []
    assert not gate.is_member_host("h")
    assert not gate.may_open(connection, "/meshsub/1.1.0")
    assert not gate.may_open(connection, TARGET_CONNECTIONS_ID)
    assert gate.may_open(connection, "/swarm-node/control/1")
    assert gate.may_open(connection, "/ipfs/id/1.0.0")
    admitted.add(connection.peer)
    assert gate.overdue(61) == []
    assert connection.yamux.widened == [full]
    assert gate.limits(connection.peer, dialed=False) == full
    assert gate.may_open(connection, "/meshsub/1.1.0")
    assert gate.is_member_host("h")
    assert gate.add_connection(fake(2), 70) == []  # its place is free


def test_a_peer_with_a_lease_is_never_a_stranger() -> None:
    full = YamuxLimits()
    known = {bytes([1]) * 32}
    gate = Gate(NOBODY, full, GateRules(connections=1), knows=known.__contains__)
    member = fake(1)
    assert gate.limits(member.peer, dialed=False) == full
    for now_s in range(40):
        assert gate.add_connection(member, now_s) == []
    assert gate.may_open(member, "/meshsub/1.1.0")
    for now_s in range(40):
        assert member not in gate.add_connection(fake(2 + now_s), now_s)
    assert member not in gate.review([member], 100)
    assert gate.is_member_host("h")


def test_the_addresses_of_members_are_remembered_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.transport.connection.gate._MAX_MEMBER_HOSTS", 10)
    gate = Gate(None, YamuxLimits())
    for number in (*range(20), 11):
        gate.add_connection(fake(1, f"10.0.0.{number}"), 0)
    assert len(gate._member_hosts) == 10
    gate.add_connection(fake(1, "10.0.1.1"), 0)
    assert gate.is_member_host("10.0.0.11")
    assert not gate.is_member_host("10.0.0.10")


def test_a_peer_that_we_relay_for_may_stay() -> None:
    gate = Gate(NOBODY, YamuxLimits(), None, lambda peer: True)
    connection = fake(1)
    assert gate.add_connection(connection, 0) == []
    assert gate.overdue(1000) == []


def test_a_peer_whose_lease_has_ended_is_a_stranger_again() -> None:
    admitted = {bytes([1]) * 32}
    gate = Gate(admitted.__contains__, YamuxLimits(), GateRules(connections=1, stay_s=60))
    member, dialed = fake(1), fake(2, dialed=True)
    assert gate.add_connection(member, 0) == []
    assert gate.review([member, dialed], 100) == []
    assert gate.may_open(member, "/meshsub/1.1.0")
    admitted.clear()
    assert gate.review([member, dialed], 115) == []
    assert not gate.may_open(member, "/meshsub/1.1.0")
    assert gate.review([member, dialed], 175) == []
    assert gate.review([member, dialed], 176) == [member]
    gate.remove_connection(member)
    assert gate._strangers == gate._by_host == {}


@asynccontextmanager
async def guarded(admitted: set[PeerKey], rules: GateRules) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """A node, and a stranger that has dialed it."""
    policy = PeerPolicy(admits=admitted.__contains__)
    node = Libp2pTransport(Key(b"n" * 32), [ANY], policy=policy, rules=TransportRules(gate=rules))
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
            await asks(stranger, node, TARGET_CONNECTIONS_ID)
        connection = node._connections(stranger.key)[0].yamux
        assert connection.limits.max_inbound_streams == 6
        assert connection.unread_bytes <= 6 * 262_144
        assert stranger.peers() == [node.key]

        admitted.add(stranger.key)
        assert await asks(stranger, node, TARGET_CONNECTIONS_ID) == b""  # served, although it knows no address to dial
        assert connection.limits == YamuxLimits()


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


async def test_the_oldest_stranger_makes_room_for_one_more() -> None:
    async with guarded(set(), GateRules(per_address=1)) as (node, stranger):
        address = node.host.get_addrs()[0]  # type: ignore[union-attr]
        other = Libp2pTransport(Key(b"o" * 32), [ANY])

        async def ignore(*_: object) -> None: ...

        async with trio.open_nursery() as nursery:
            await nursery.start(other.serve, ignore)
            await other.connect(node.key, [str(address).partition("/p2p/")[0]])
            while stranger.peers():  # noqa: ASYNC110
                await trio.sleep(0.01)
            assert node.peers() == [other.key]
            nursery.cancel_scope.cancel()
