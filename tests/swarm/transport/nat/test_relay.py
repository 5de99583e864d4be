"""Peers that cannot be dialed: reservations at relays, circuits, their replacement, and what is refused."""

import socket

import libp2p
import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr
from relay_kit import Stream, echo, ended, exchange, transport, until, world

from codec.sign import Key
from node.host.port import free_port
from swarm.protocol.core.reach import circuit
from swarm.transport.base import Lane, PathKind, PeerKey, Unreachable
from swarm.transport.identity import peer_id
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.nat.circuit import (
    HOP_ID,
    STOP_ID,
    HopMessage,
    Status,
    StopMessage,
    peer_in,
    read_message,
    write_message,
)
from swarm.transport.nat.relay import Relay, RelayRules
from swarm.transport.nat.relay_strangers import StrangerRules
from swarm.transport.rules import PeerPolicy


@pytest.mark.usefixtures("no_punching")
async def test_a_hidden_peer_is_reached_and_the_relay_reads_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passed = bytearray()
    copy = Relay._copy

    class Tapped:
        def __init__(self, sink: Stream) -> None:
            self._sink = sink

        async def send_all(self, data: bytes) -> None:
            passed.extend(data)
            await self._sink.send_all(data)

        async def send_eof(self) -> None:
            await self._sink.send_eof()

    monkeypatch.setattr(Relay, "_copy", lambda self, source, sink, *rest: copy(self, source, Tapped(sink), *rest))
    async with world() as w:
        assert w.hidden.reservations.circuits == [circuit(w.address)]
        await w.call()
        for near, far in ((w.caller, w.hidden), (w.hidden, w.caller)):
            for lane in Lane:
                async with await near.open_stream(far.key, lane) as stream:
                    assert await exchange(stream, b"the policy's bits" * 100) == b"the policy's bits" * 100
            assert near.path_kind(far.key) is PathKind.CIRCUIT
            assert near.target_connections(far.key) == 1
        seen_at = w.hidden.remote_address(w.caller.key)
        assert seen_at is not None
        assert seen_at.startswith("/ip4/127.0.0.1/tcp/")  # as the relay sees it
        assert w.caller.remote_address(w.hidden.key) == circuit(w.address)
        assert w.relay.relay is not None
        assert w.relay.relay.circuits >= 1
        assert w.relay.relay.relayed_bytes == len(passed) > 10_000
        assert b"policy" not in passed


@pytest.mark.usefixtures("no_punching")
async def test_a_circuit_is_replaced_before_the_byte_limit() -> None:
    async with world(RelayRules(circuit_bytes=400_000)) as w:
        await w.call()
        async with await w.caller.open_stream(w.hidden.key, Lane.CONTROL) as stream:
            data = bytes(range(256)) * 8192
            assert await exchange(stream, data, 0.01) == data
        assert w.caller.relayed_links.rotated >= 2_097_152 // 400_000
        assert w.caller.path_kind(w.hidden.key) is PathKind.CIRCUIT
        assert w.relay.relay is not None
        await until(lambda: w.relay.relay and w.relay.relay.circuits == 1)  # the replaced circuits have ended


@pytest.mark.usefixtures("no_punching")
async def test_a_circuit_is_replaced_before_the_time_limit() -> None:
    async with world(RelayRules(circuit_s=1.0)) as w:
        await w.call()
        async with await w.caller.open_stream(w.hidden.key, Lane.CONTROL) as stream:
            for count in range(8):
                await stream.send_all(bytes([count]))
                assert await stream.receive_some() == bytes([count])
                await trio.sleep(0.2)
        assert w.caller.relayed_links.rotated >= 1


async def test_strangers_get_no_reservation() -> None:
    async with world(may_reserve=lambda peer: False, reserve=False) as w:
        await until(lambda: "PERMISSION_DENIED" in w.hidden.reservations.state[w.address])
        with pytest.raises(Unreachable, match="NO_RESERVATION"):
            await w.call()


@pytest.mark.usefixtures("no_punching")
@pytest.mark.parametrize(
    "rules", [RelayRules(circuits=0), RelayRules(circuits_to_one=0), RelayRules(circuits_from_one=0)]
)
async def test_circuits_are_limited(rules: RelayRules) -> None:
    async with world(rules) as w:
        with pytest.raises(Unreachable, match="RESOURCE_LIMIT"):
            await w.call()


@pytest.mark.usefixtures("no_punching")
@pytest.mark.slow
async def test_strangers_get_short_circuits_and_leave_room_for_members() -> None:
    members: set[PeerKey] = set()
    rules = RelayRules(strangers=StrangerRules(to_one=1), stranger_s=4.0, circuit_s=100.0)
    async with world(rules, may_reserve=lambda peer: peer in members, reserve=False) as w:
        members.add(w.hidden.key)
        await until(lambda: not w.hidden.reservations.state[w.address])
        await w.call()
        other = transport(4)
        await w.nursery.start(other.serve, echo)
        with pytest.raises(Unreachable, match="RESOURCE_LIMIT"):
            await other.connect(w.hidden.key, [circuit(w.address)])
        members.add(w.caller.key)  # it has joined: the next circuit is a member's
        await until(lambda: w.caller.relayed_links.rotated)
        await until(lambda: w.relay.relay and not w.relay.relay.strangers.count)
        await other.connect(w.hidden.key, [circuit(w.address)])
        assert w.caller.relayed_links.rotated == 1


@pytest.mark.usefixtures("no_punching")
async def test_a_strangers_circuit_is_bounded_by_the_relays_rules_and_not_by_an_allowance() -> None:
    """The caller is a stranger to the relay, which reads at most 32 KiB of it; bytes for the circuit do not count."""
    members: set[PeerKey] = set()
    rules = RelayRules(stranger_bytes=2 << 20)
    async with world(rules, may_reserve=members.__contains__, reserve=False, admits=members.__contains__) as w:
        members.add(w.hidden.key)
        await until(lambda: not w.hidden.reservations.state[w.address])
        await w.call()
        async with await w.caller.open_stream(w.hidden.key, Lane.CONTROL) as stream:
            assert await exchange(stream, bytes(300_000)) == bytes(300_000)
        assert w.caller.relayed_links.rotated == 0
        (connection,) = w.relay._connections(w.caller.key)
        assert connection.yamux.limits.allowance_bytes == 32_768


async def test_reservations_are_limited() -> None:
    async with world(RelayRules(reservations=0), reserve=False) as w:
        await until(lambda: "RESERVATION_REFUSED" in w.hidden.reservations.state[w.address])


async def test_a_relay_that_starts_later_is_found() -> None:
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    hidden = transport(2, via=[address])
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(hidden.serve, echo)
            await until(lambda: "nothing answers" in hidden.reservations.state[address])
            relay = Libp2pTransport(Key(bytes([1]) * 32), [address], policy=PeerPolicy(may_reserve=lambda peer: True))
            await nursery.start(relay.serve, echo)
            await until(lambda: not hidden.reservations.state[address])
            nursery.cancel_scope.cancel()


async def test_a_lost_reservation_is_renewed() -> None:
    async with world() as w:
        assert w.relay.relay is not None
        await w.relay.disconnect(w.hidden.key)
        w.relay.relay._reservations.clear()
        await until(lambda: w.relay.relay and w.relay.relay.reservations == [w.hidden.key])
        await w.call()


async def test_a_relay_does_not_lead_to_itself() -> None:
    async with world() as w:
        with pytest.raises(Unreachable, match="one of the two ends"):
            await w.relay.connect(w.caller.key, [circuit(w.address)])
        with pytest.raises(Unreachable, match="one of the two ends"):
            await w.caller.connect(w.hidden.key, [circuit(w.address, peer_id(w.hidden.key))])


async def test_circuits_come_only_from_our_own_relays() -> None:
    """Otherwise any peer could bring connections that count against a relay's handshakes and not its own."""
    async with world() as w:
        await w.caller.connect(w.relay.key, [w.address])
        await w.relay.connect(w.caller.key, [])
        async with await w.relay.open_protocol_stream(w.caller.key, STOP_ID) as stream:
            await write_message(stream, StopMessage(type=StopMessage.CONNECT, peer=peer_in(w.hidden.key, None)))
            answer = await read_message(stream, StopMessage)
        assert answer.status == Status.PERMISSION_DENIED


@pytest.mark.parametrize("invalid", [b"\xff\xff\xff\xff", b"\x80\x40" + bytes(10), b"\x02\x08\x09", b"\x05abc", b""])
async def test_an_invalid_message_ends_its_stream_and_nothing_else(invalid: bytes) -> None:
    async with world() as w:
        await w.caller.connect(w.relay.key, [w.address])
        stream = await w.caller.open_protocol_stream(w.relay.key, HOP_ID)
        await stream.send_all(invalid)
        await stream.send_eof()
        assert await ended(stream)
        assert w.relay.peers()
        await w.call()


async def test_a_silent_caller_is_not_waited_for_long() -> None:
    async with world(RelayRules(setup_s=0.1)) as w:
        await w.caller.connect(w.relay.key, [w.address])
        stream = await w.caller.open_protocol_stream(w.relay.key, HOP_ID)
        await stream.send_all(b"\x10")
        assert await stream.receive_some() == b""


async def test_an_address_is_confirmed_only_by_the_peer_that_answers_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another peer nor a listener that stays silent confirms it; and no connection is left."""
    async with world(reserve=False) as w:
        assert w.caller.host is not None
        (own,) = (str(address).partition("/p2p/")[0] for address in w.caller.host.get_addrs())
        assert await w.relay.probe(w.caller.key, own)
        assert not await w.relay.probe(w.hidden.key, own)
        assert not await w.relay.probe(w.caller.key, f"/ip4/127.0.0.1/tcp/{free_port()}")
        for address in ("nonsense", "/ip4/127.0.0.1/udp/4", circuit(own), "/ip4/127.0.0.1/tcp/0"):
            assert not await w.relay.probe(w.caller.key, address)
        monkeypatch.setattr("swarm.transport.probe._PROBE_S", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as mute:
            assert not await w.relay.probe(w.caller.key, f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}")
        assert w.caller.key not in w.relay.peers()
        assert not await transport(5).probe(w.caller.key, own)  # it does not serve


async def test_hop_messages_as_stock_libp2p_writes_them() -> None:
    near, far = trio.testing.memory_stream_pair()
    message = HopMessage(type=HopMessage.CONNECT, peer=peer_in(Key(bytes(32)).public, "/ip4/8.8.8.8/tcp/1"))
    body = message.SerializeToString()
    await write_message(near, message)
    assert await far.receive_some() == bytes([len(body)]) + body


@pytest.mark.usefixtures("no_punching")
async def test_a_stock_relay_serves_us() -> None:
    """py-libp2p's relay, unchanged. It confuses two circuits to one peer, so there a circuit cannot be replaced."""
    address = f"/ip4/127.0.0.1/tcp/{free_port()}"
    listen = [Multiaddr(address)]
    stock = libp2p.new_host(key_pair=create_new_key_pair(bytes([9]) * 32), listen_addrs=listen)
    limits = RelayLimits(duration=3600, data=1 << 30, max_circuit_conns=8, max_reservations=8)
    with trio.fail_after(15):
        async with (
            stock.run(listen_addrs=listen),
            background_trio_service(CircuitV2Protocol(stock, limits, allow_hop=True)),
            trio.open_nursery() as nursery,
        ):
            hidden, caller = transport(2, via=[address]), transport(3)
            await nursery.start(hidden.serve, echo)
            await nursery.start(caller.serve, echo)
            await until(lambda: not hidden.reservations.state[address])
            await caller.connect(hidden.key, [circuit(address)])
            async with await caller.open_stream(hidden.key, Lane.CONTROL) as stream:
                assert await exchange(stream, bytes(300_000)) == bytes(300_000)
            assert caller.path_kind(hidden.key) is PathKind.CIRCUIT
            nursery.cancel_scope.cancel()
