"""Hole punching: a connection leaves its circuit, and what a peer can make us dial for it."""

from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import trio
import trio.testing
from relay_kit import ANY, ended, exchange, transport, until, world

from codec.errors import PeerError
from swarm.protocol.core.reach import circuit
from swarm.transport.base import Lane, PathKind
from swarm.transport.connection.migrating_connection import MigratingConnection, RelayedLink
from swarm.transport.connection.tcp import TOKEN_MARK
from swarm.transport.nat import punch
from swarm.transport.nat.punch import Puncher


async def test_a_connection_leaves_its_circuit_in_mid_stream() -> None:
    async with world() as w:
        await w.call()
        async with await w.caller.open_stream(w.hidden.key, Lane.CONTROL) as stream:
            data = bytes(range(256)) * 4096
            assert await exchange(stream, data, 0.05) == data
        for near, far in ((w.caller, w.hidden), (w.hidden, w.caller)):
            assert near.path_kind(far.key) is PathKind.PUNCHED
            assert near.puncher.punched == 1
        assert w.relay.relay is not None
        await until(lambda: w.relay.relay and not w.relay.relay.circuits)
        relayed = w.relay.relay.relayed_bytes
        async with await w.hidden.open_stream(w.caller.key, Lane.CONTROL) as stream:
            assert await exchange(stream, bytes(100_000)) == bytes(100_000)
        assert w.relay.relay.relayed_bytes == relayed


async def test_a_meeting_dials_no_address_of_a_narrower_scope_than_ours() -> None:
    puncher = transport(4).puncher
    addrs = ["/ip4/127.0.0.1/tcp/22", "/ip4/10.0.0.1/tcp/22", "/ip4/8.8.8.8/tcp/4001", "what", circuit(ANY)]
    assert puncher._targets(addrs) == {("8.8.8.8", 4001)}
    puncher._relays.observed = "/ip4/192.168.1.2/tcp/4"
    assert puncher._targets(addrs) == {("8.8.8.8", 4001), ("10.0.0.1", 22)}


async def test_punching_needs_a_circuit() -> None:
    async with world() as w:
        await w.caller.connect(w.relay.key, [w.address])
        edge = w.relay._edges[w.caller.key]
        (connection,) = edge.connections
        near, _ = trio.testing.memory_stream_pair()
        with pytest.raises(PeerError):
            await w.relay.puncher.follow(connection, near)


async def test_a_peer_can_make_us_dial_only_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each meeting dials the peer's addresses for seconds."""
    meetings: list[bytes] = []

    async def meet(self: Puncher, token: bytes, addrs: object, *, leads: bool) -> None:
        meetings.append(token)

    monkeypatch.setattr(Puncher, "_meet", meet)
    puncher, path = transport(4).puncher, MigratingConnection(RelayedLink(trio.testing.memory_stream_pair()[0]))
    connection = SimpleNamespace(path=path)
    for turn in range(8):
        near, far = trio.testing.memory_stream_pair()
        body = msgspec.msgpack.encode((bytes([turn]) * 16, ("/ip4/8.8.8.8/tcp/53",)))
        await far.send_all(len(body).to_bytes(2, "little") + body + b"\3")
        with nullcontext() if turn < 3 else pytest.raises(PeerError, match="often enough"):
            await puncher.follow(connection, near)  # type: ignore[arg-type]
    assert len(meetings) == 3


async def test_an_end_that_dials_itself_does_not_meet_itself() -> None:
    """Behind one NAT both ends have the same private address, so an end's dial may reach its own listener."""
    async with world() as w:
        assert w.caller.tcp is not None
        (own,) = w.caller.tcp.listening
        with trio.move_on_after(0.5):
            address = f"/ip4/127.0.0.1/tcp/{own[1]}"
            w.caller.known_relays.observed = address
            assert await w.caller.puncher._meet(bytes(16), [address], leads=True) is None
            pytest.fail("it met itself")
        assert not w.caller.puncher._meetings


def test_the_two_ends_send_different_tokens() -> None:
    assert punch._followers_token(bytes(16)) != bytes(16)
    assert punch._followers_token(punch._followers_token(bytes(16))) == bytes(16)


@pytest.mark.usefixtures("no_punching")
async def test_an_unexpected_token_is_refused() -> None:
    async with world() as w:
        assert w.hidden.tcp is not None
        (own,) = w.hidden.tcp.listening
        with trio.fail_after(5):
            stream = await trio.open_tcp_stream(*own)
            await stream.send_all(TOKEN_MARK + bytes(16))
            assert await ended(stream)
        near, far = trio.testing.memory_stream_pair()
        await w.hidden.relayed_links.accept_link(bytes(16), RelayedLink(near))
        assert await far.receive_some() == b""
