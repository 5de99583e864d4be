"""The libp2p transport over real sockets on loopback, against itself and against stock py-libp2p."""

import signal
import socket
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version

import libp2p
import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.ping import PingService
from libp2p.identity.identify import identify
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p_kit import ANY, Stream, a_process, echo, transport, two, until_ended
from multiaddr import Multiaddr

from codec.errors import PeerError, UsageError
from codec.sign import Key
from swarm.transport.base import Lane, PeerKey, Unreachable
from swarm.transport.connection import tls
from swarm.transport.dialer import DialRules
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.lanes import TARGET_CONNECTIONS_ID
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.parallel import CONNECTION_COUNTS
from swarm.transport.rules import TransportRules
from swarm.transport.tuning import tune
from swarm.transport.yamux import YamuxLimits


async def test_echo_in_both_directions_on_both_lanes() -> None:
    async with two() as (a, b, _):
        await trio.testing.wait_all_tasks_blocked(0.01)
        for near, far in ((a, b), (b, a)):
            for lane in Lane:
                async with await near.open_stream(far.key, lane) as stream:
                    await stream.send_all(b"hello")
                    assert await stream.receive_some() == b"hello"
            assert near.peers() == [far.key]
            address = near.remote_address(far.key)
            assert address is not None
            assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert near.remote_address(bytes(32)) is None


async def test_lanes_have_connections_of_their_own() -> None:
    seen: dict[Lane, set[object]] = {lane: set() for lane in Lane}

    async def note(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        seen[lane].add(stream._connection)  # type: ignore[attr-defined]
        await stream.send_all(b"!")

    async with two(note) as (a, b, _):
        for lane in (Lane.CONTROL, Lane.BULK, Lane.CONTROL, Lane.BULK):
            async with await a.open_stream(b.key, lane) as stream:
                assert await stream.receive_some() == b"!"
    assert len(seen[Lane.CONTROL]) == 1 == len(seen[Lane.BULK])
    assert seen[Lane.CONTROL] != seen[Lane.BULK]


async def test_is_a_stream() -> None:
    send, receive = trio.open_memory_channel[Stream](10)

    async def pass_on(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        await send.send(stream)
        await trio.sleep_forever()

    async with two(pass_on) as (a, b, _):

        async def make() -> tuple[Stream, Stream]:
            return await a.open_stream(b.key, Lane.BULK), await receive.receive()

        await trio.testing.check_half_closeable_stream(make, None)


async def test_megabytes_and_traffic() -> None:
    got = trio.Event()

    async def take(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        length = 0
        async for data in stream:
            length += len(data)
        assert length == 8_000_000
        got.set()

    async with two(take) as (a, b, _):
        async with await a.open_stream(b.key, Lane.BULK) as stream:
            await stream.send_all(bytes(8_000_000))
        await got.wait()
        for count in (a.traffic.sent, b.traffic.received):
            assert 8_000_000 < count < 8_200_000  # TLS and frames cost under 3 %


async def test_disconnect_breaks_streams_at_both_ends() -> None:
    ended = trio.Event()

    async def wait(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        ended.set()

    async with two(wait) as (a, b, addrs):
        stream = await a.open_stream(b.key, Lane.CONTROL)
        await trio.testing.wait_all_tasks_blocked(0.02)
        await a.disconnect(b.key)
        assert a.peers() == []
        await ended.wait()
        with pytest.raises(trio.BrokenResourceError):
            await stream.receive_some()
        with pytest.raises(Unreachable):
            await a.open_stream(b.key, Lane.CONTROL)
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert b.peers() == []
        await a.connect(b.key, addrs)  # again, at once


async def test_a_peer_error_drops_the_peer() -> None:
    async def refuse(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        raise PeerError("nonsense")

    async with two(refuse) as (a, b, _):
        await a.open_stream(b.key, Lane.CONTROL)
        while a.peers():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_a_bug_in_accept_ends_serve() -> None:
    async def broken(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        raise ZeroDivisionError

    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with two(broken) as (a, b, _):
            await a.open_stream(b.key, Lane.CONTROL)
            await trio.sleep_forever()


async def test_a_bug_that_a_stream_causes_drops_only_its_peer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_STRICT")

    async def broken(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        if peer != other.key:
            raise ZeroDivisionError
        await echo(peer, lane, stream)

    other = transport(3)
    async with two(broken) as (a, b, addrs), trio.open_nursery() as nursery:
        await nursery.start(other.serve, echo)
        await other.connect(b.key, addrs)
        with suppress(trio.BrokenResourceError):
            await until_ended(await a.open_stream(b.key, Lane.CONTROL))
        while a.peers():  # noqa: ASYNC110
            await trio.sleep(0.01)
        assert b.peers() == [other.key]
        async with await other.open_stream(b.key, Lane.CONTROL) as stream:
            await stream.send_all(b"still served")
            assert await stream.receive_some() == b"still served"
        nursery.cancel_scope.cancel()
    assert any("ZeroDivisionError" in (record.exc_text or "") for record in caplog.records)


async def test_a_bug_in_a_handler_of_ours_ends_its_stream_and_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARM_STRICT")

    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with two() as (a, b, _):
        b._serves[TARGET_CONNECTIONS_ID] = broken
        stream = await a.open_protocol_stream(b.key, TARGET_CONNECTIONS_ID)
        with pytest.raises(trio.BrokenResourceError):
            await until_ended(stream)
        assert [record.levelname for record in caplog.records if "ZeroDivisionError" in (record.exc_text or "")] == [
            "ERROR"
        ]
        assert a.peers() == [b.key]


async def test_a_peer_that_asks_for_more_connections_without_a_number(caplog: pytest.LogCaptureFixture) -> None:
    async with two() as (a, b, _):
        stream = await a.open_protocol_stream(b.key, TARGET_CONNECTIONS_ID)
        await stream.send_eof()
        await until_ended(stream)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_port_in_use_and_bad_addresses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = Libp2pTransport(Key.generate(), [ANY, f"/ip4/127.0.0.1/tcp/{port}"])
        with pytest.raises(UsageError, match=f"Port {port} on 127.0.0.1 is in use"):
            await busy.serve(echo)
    for address in ("", "nonsense", "/ip4/127.0.0.1/udp/4", "/ip4/300.0.0.1/tcp/4", "/ip4/203.0.113.7/tcp/0"):
        with pytest.raises(UsageError, match="listen on"):
            await Libp2pTransport(Key.generate(), [address]).serve(echo)


def test_announced_addresses_can_be_dialed() -> None:
    good = ["/ip4/203.0.113.7/tcp/4701", "/dns4/gpu.example.org/tcp/4701", "/ip6/2001:db8::1/tcp/4701"]
    assert Libp2pTransport(Key.generate(), [ANY], good).announce == good
    for address in ("", "gpu.example.org:4701", "/ip4/203.0.113.7", "/ip4/203.0.113.7/tcp/0", "/ip4/203.0.113.7/udp/1"):
        with pytest.raises(UsageError, match="no address to announce"):
            Libp2pTransport(Key.generate(), [ANY], [address])


async def test_two_of_ours_cannot_share_a_port() -> None:
    async with two() as (_, _, addrs):
        with pytest.raises(UsageError, match="in use"):
            await Libp2pTransport(Key.generate(), addrs).serve(echo)


async def test_every_address_is_tried() -> None:
    async with two() as (a, b, addrs):
        await a.disconnect(b.key)
        with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts and sends nothing
            dead = f"/ip4/127.0.0.1/tcp/{mute.getsockname()[1]}"
            await a.connect(b.key, ["/ip4/127.0.0.1/tcp/1", "nonsense", dead, *addrs])  # a mute address gets 12 s
        assert a.peers() == [b.key]


async def test_failed_dials_back_off_no_longer_than_the_rules_say() -> None:
    rules = DialRules(backoff_first_s=0.2, backoff_most_s=0.4)
    async with two() as (_, b, addrs):
        a = Libp2pTransport(Key.generate(), [ANY], rules=TransportRules(dial=rules))
        with pytest.raises(Unreachable, match="not serving"):
            await a.connect(b.key, addrs)
        async with trio.open_nursery() as nursery:
            await nursery.start(a.serve, echo)
            with pytest.raises(Unreachable, match="is this node itself"):
                await a.connect(a.key, addrs)
            for _ in range(5):
                with pytest.raises(Unreachable, match="refused"):
                    await a.connect(b.key, ["/ip4/127.0.0.1/tcp/1"])
                with pytest.raises(Unreachable, match="next try in"):
                    await a.connect(b.key, addrs)
                await trio.sleep(0.41)
            await a.connect(b.key, addrs)  # the library would block the peer for a minute
            nursery.cancel_scope.cancel()


async def test_another_peer_at_the_address_is_refused() -> None:
    async with two() as (a, _, addrs):
        with pytest.raises(Unreachable, match="answered"):
            await a.connect(Key(bytes([9]) * 32).public, addrs)


async def test_a_peer_that_sends_invalid_bytes_on_a_stream() -> None:
    async with two() as (a, b, _):
        connection = a._connections(b.key)[0].yamux
        for words in (b"\x04\xff\xfe\xfd\n" * 10, b"\x13/multistream/1.0.0\n\xff\xff\xff\x7f", b"\0"):
            stream = await connection.open()
            await stream.send_all(words)
            with pytest.raises(trio.BrokenResourceError):
                await until_ended(stream)
        stream = await connection.open()  # one that does not wait for the answer to its proposal can still read it
        await stream.send_all(b"\x13/multistream/1.0.0\n\x03xy\n\xff\xff\xff\x7f")
        answered = b""
        while got := await stream.receive_some():
            answered += got
        assert answered == b"\x13/multistream/1.0.0\n\x03na\n"
        assert a.peers() == [b.key]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_dead_and_a_stopped_process_are_found(number: signal.Signals) -> None:
    near = transport(1, replace(YamuxLimits(), ping_interval_s=0.8, silence_s=0.8))
    async with a_process() as (child, far, address):
        with trio.fail_after(15):  # with the default limits it takes up to 20 s; test_patience tests those
            async with trio.open_nursery() as nursery:
                await nursery.start(near.serve, echo)
                await near.connect(far, [address])
                stream = await near.open_stream(far, Lane.CONTROL)
                await trio.sleep(0.1)
                child.send_signal(number)
                with pytest.raises(trio.BrokenResourceError):
                    await stream.receive_some()
                assert near.peers() == []
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("ours_dials", [True, False])
async def test_a_stock_peer(ours_dials: bool) -> None:
    """py-libp2p, unchanged: noise first, its own yamux, its own multistream."""
    key_pair = create_new_key_pair(bytes(range(32)))
    stock = libp2p.new_host(key_pair=key_pair, listen_addrs=[Multiaddr(ANY)])
    protocol = TProtocol("/swarm-node/control/1")

    async def stock_echo(stream: libp2p.abc.INetStream) -> None:
        while True:
            await stream.write(await stream.read(65_536))

    stock.set_stream_handler(protocol, stock_echo)
    ours = transport(1)
    stock_key = peer_key(str(stock.get_id()))
    data = bytes(range(256)) * 4000
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, stock.run([Multiaddr(ANY)]):
            (address,) = await nursery.start(ours.serve, echo)
            if ours_dials:
                there = str(stock.get_transport_addrs()[0])
                await ours.connect(stock_key, [there.partition("/p2p/")[0]])
                async with await ours.open_stream(stock_key, Lane.CONTROL) as stream:
                    nursery.start_soon(stream.send_all, data)
                    got = b""
                    while len(got) < len(data):
                        got += await stream.receive_some()
            else:
                await stock.connect(info_from_p2p_addr(Multiaddr(f"{address}/p2p/{peer_id(ours.key)}")))
                stream = await stock.new_stream(ID.from_base58(peer_id(ours.key)), [protocol])
                nursery.start_soon(stream.write, data)
                got = b""
                while len(got) < len(data):
                    got += await stream.read(65_536)
            assert got == data
            assert ours.peers() == [stock_key]
            await PingService(stock).ping(ID.from_base58(peer_id(ours.key)))
            nursery.cancel_scope.cancel()


async def test_without_a_known_openssl_noise_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(context: object) -> None:
        raise tls.TlsUnavailable("statically linked")

    monkeypatch.setattr(tls, "accept_any_certificate", refuse)
    async with two() as (a, b, _):
        assert {connection.security for connection in a._connections(b.key)} == {"/noise"}
        async with await a.open_stream(b.key, Lane.BULK) as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"


async def test_library_is_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    async with two() as (a, _b, _):
        with pytest.raises(Unreachable):
            await a.connect(bytes(32), ["/ip4/127.0.0.1/tcp/1"])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("gone", [True, False])
async def test_a_peer_that_asks_for_connections_and_keeps_none(monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """We dial it at most as often as it may ask for, and not at all once its last connection has ended."""
    async with two() as (a, b, _):
        dialed: list[PeerKey] = []

        async def dial(peer: PeerKey, *_: object) -> None:
            dialed.append(peer)
            await trio.lowlevel.checkpoint()
            if gone:
                a._edges.pop(peer, None)
                a._addresses.pop(peer, None)

        monkeypatch.setattr(a, "_dial", dial)
        connection = b._edges[a.key].pick(Lane.CONTROL)
        assert connection is not None
        with trio.fail_after(5):
            async with await b.open_on(connection, TARGET_CONNECTIONS_ID) as stream:
                await stream.send_all(b"\xff")
                await stream.receive_some(1)
        assert dialed == [b.key] * (1 if gone else CONNECTION_COUNTS[-1])


@pytest.mark.parametrize("dialer_sends", [True, False])
async def test_a_long_path_gets_several_bulk_connections(monkeypatch: pytest.MonkeyPatch, dialer_sends: bool) -> None:
    """Also when the sender is the end that was dialed: it asks the other end to dial again."""
    monkeypatch.setattr("swarm.transport.bulk_connections.target_connections", lambda *_: 4)
    on: list[object] = []

    async def note(peer: PeerKey, lane: Lane, stream: Stream) -> None:
        on.append(stream._connection)  # type: ignore[attr-defined]
        await echo(peer, lane, stream)

    a, b = transport(1), transport(2)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(a.serve, note)
            addrs = await nursery.start(b.serve, note)
            await a.connect(b.key, addrs)
            await trio.sleep(0.05)
            near, far = (a, b) if dialer_sends else (b, a)
            assert near.target_connections(far.key) == 4
            control = await near.open_stream(far.key, Lane.CONTROL)
            await control.send_all(b"x")
            await control.receive_some()
            streams = [await near.open_stream(far.key, Lane.BULK) for _ in range(6)]
            for stream in streams:
                await stream.send_all(b"x")
                await stream.receive_some()
            assert len(set(on[1:])) == 4
            assert on[0] not in on[1:]
            for stream in streams:
                await stream.aclose()
            await trio.sleep(0.1)
            edge = a._edges[b.key]
            assert edge.idle(trio.current_time(), 60) == []
            assert len(edge.idle(trio.current_time() + 61, 60)) == 3  # of four, one stays
            nursery.cancel_scope.cancel()


async def test_the_congestion_control_of_a_connection_is_known() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        expected = tune(sock)
    async with two() as (a, b, _):
        assert a.congestion_control(b.key) == expected
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert b.congestion_control(a.key) == expected
        assert a.congestion_control(bytes(32)) == ""


async def test_peers_are_told_the_name_and_the_release() -> None:
    async with two() as (a, _, _):
        assert a.host is not None
        told = identify._mk_identify_protobuf(a.host, None)
        assert told.agent_version == f"swarm-node/{version('swarm-node')}"
