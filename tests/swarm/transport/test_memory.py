"""The memory transport: streams, delay and rate, firewalls and relays."""

import pytest
import trio
import trio.testing

from codec.errors import PeerError
from codec.sign import Key
from swarm.transport.base import Lane, PathKind, PeerKey, Unreachable
from swarm.transport.memory import Link, MemoryNetwork, MemoryStream, MemoryTransport

A, B, C = (Key(bytes([n]) * 32) for n in (1, 2, 3))


async def echo(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
    async for data in stream:
        await stream.send_all(data)


def pair(link: Link | None = None) -> tuple[MemoryStream, MemoryStream]:
    network = MemoryNetwork(link)
    near, far = MemoryTransport(network, A), MemoryTransport(network, B)
    network.join(near.key, far.key)
    return network.stream_pair(near, far)


def network_of(stream: MemoryStream) -> MemoryNetwork:
    return stream._out._network


async def test_is_a_stream() -> None:
    async def make() -> tuple[MemoryStream, MemoryStream]:
        return pair()

    async def make_clogged() -> tuple[MemoryStream, MemoryStream]:
        near, far = pair(Link(buffer_bytes=100))
        await near.send_all(bytes(100))
        await far.send_all(bytes(100))
        return near, far

    await trio.testing.check_half_closeable_stream(make, make_clogged)


async def test_echo_and_traffic(nursery: trio.Nursery) -> None:
    network = MemoryNetwork()
    a, b = MemoryTransport(network, A), MemoryTransport(network, B)
    addrs = await nursery.start(b.serve, echo)
    assert addrs == ["/memory/2"]
    await a.connect(b.key, ["/memory/99", *addrs])
    await a.connect(b.key, [])  # connected already: returns at once
    async with await a.open_stream(b.key, Lane.CONTROL) as stream:
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
    assert (a.traffic.sent, a.traffic.received) == (5, 5)
    assert (b.traffic.sent, b.traffic.received) == (5, 5)
    assert (a.peers(), b.peers()) == ([B.public], [A.public])
    assert a.remote_address(b.key) == "/memory/2"
    await a.disconnect(b.key)
    assert a.peers() == [] == b.peers()
    assert a.remote_address(b.key) is None


async def test_delay_and_shared_rate(autojump_clock: trio.testing.MockClock) -> None:
    near, far = pair(Link(delay_s=0.1, rate_bytes_s=1000, buffer_bytes=10_000))
    start_s = trio.current_time()
    await near.send_all(bytes(500))
    assert trio.current_time() == start_s  # sending does not wait for the link
    assert len(await far.receive_some()) == 500
    assert trio.current_time() - start_s == pytest.approx(0.6)
    await near.send_eof()
    assert await far.receive_some() == b""
    assert trio.current_time() - start_s == pytest.approx(0.7)


async def test_writer_waits_for_reader(autojump_clock: trio.testing.MockClock) -> None:
    near, far = pair(Link(buffer_bytes=1000))
    with trio.move_on_after(60) as scope:
        await near.send_all(bytes(1001))
    assert scope.cancelled_caught
    assert len(await far.receive_some()) == 1000


async def test_cut_heal_kill(nursery: trio.Nursery, autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork(Link(delay_s=0.05))
    a, b, c = (MemoryTransport(network, key) for key in (A, B, C))
    addrs_b = await nursery.start(b.serve, echo)
    addrs_c = await nursery.start(c.serve, echo)
    await a.connect(b.key, addrs_b)
    await a.connect(c.key, addrs_c)
    to_b, to_c = await a.open_stream(b.key, Lane.BULK), await a.open_stream(c.key, Lane.BULK)
    with pytest.RaisesGroup(trio.BrokenResourceError):
        async with trio.open_nursery() as waiting:
            waiting.start_soon(to_b.receive_some)
            await trio.testing.wait_all_tasks_blocked()
            network.cut(a.key, b.key)
    with pytest.raises(Unreachable):
        await a.connect(b.key, addrs_b)
    with pytest.raises(Unreachable):
        await a.open_stream(b.key, Lane.BULK)
    await to_c.send_all(b"still here")
    assert await to_c.receive_some() == b"still here"
    network.heal(a.key, b.key)
    await a.connect(b.key, addrs_b)
    network.kill(c.key)
    with pytest.raises(trio.BrokenResourceError):
        await to_c.send_all(b"x")
    with pytest.raises(Unreachable):
        await a.connect(c.key, addrs_c)
    assert a.peers() == [b.key]


async def test_another_peer_at_the_address_is_refused(nursery: trio.Nursery) -> None:
    network = MemoryNetwork()
    a, b = MemoryTransport(network, A), MemoryTransport(network, B)
    addrs = await nursery.start(b.serve, echo)
    with pytest.raises(Unreachable, match="does not answer"):
        await a.connect(C.public, addrs)


async def test_a_peer_error_drops_the_peer(nursery: trio.Nursery) -> None:
    network = MemoryNetwork()
    a, b = MemoryTransport(network, A), MemoryTransport(network, B)

    async def refuse(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
        await stream.receive_some()
        raise PeerError("nonsense")

    addrs = await nursery.start(b.serve, refuse)
    await a.connect(b.key, addrs)
    first, second = await a.open_stream(b.key, Lane.CONTROL), await a.open_stream(b.key, Lane.CONTROL)
    await first.send_all(b"x")
    with pytest.raises(trio.BrokenResourceError):
        await second.receive_some()
    assert b.peers() == []


async def test_serve_ends_and_breaks_streams() -> None:
    network = MemoryNetwork()
    a, b = MemoryTransport(network, A), MemoryTransport(network, B)
    async with trio.open_nursery() as nursery:
        addrs = await nursery.start(b.serve, echo)
        await a.connect(b.key, addrs)
        stream = await a.open_stream(b.key, Lane.CONTROL)
        nursery.cancel_scope.cancel()
    with pytest.raises(trio.BrokenResourceError):
        await stream.receive_some()
    with pytest.raises(Unreachable):
        await a.connect(b.key, addrs)


async def test_a_shielded_peer_cannot_be_dialed(autojump_clock: trio.testing.MockClock, nursery: trio.Nursery) -> None:
    network = MemoryNetwork()
    a, b = MemoryTransport(network, A), MemoryTransport(network, B)
    (to_a,) = await nursery.start(a.serve, echo)
    (to_b,) = await nursery.start(b.serve, echo)
    network.shield(b.key)
    assert (await a.probe(b.key, to_b), await b.probe(a.key, to_a)) == (False, True)
    with pytest.raises(Unreachable):
        await a.connect(b.key, [to_b])
    await b.connect(a.key, [to_a])  # the shielded peer can dial
    assert (a.path_kind(b.key), b.path_kind(a.key)) == (PathKind.ACCEPTED, PathKind.DIALED)
    async with await a.open_stream(b.key, Lane.CONTROL) as stream:
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
    assert a.path_kind(bytes(32)) is None


async def test_a_relay_leads_to_a_peer_with_a_reservation(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    network = MemoryNetwork()
    relay, caller = MemoryTransport(network, A), MemoryTransport(network, C)
    (to_relay,) = await nursery.start(relay.serve, echo)
    hidden = MemoryTransport(network, B, via=[to_relay])
    network.shield(hidden.key)
    own, through = await nursery.start(hidden.serve, echo)
    with pytest.raises(Unreachable):
        await caller.connect(hidden.key, [own])
    await trio.sleep(1)
    await caller.connect(hidden.key, [through, own])
    assert (caller.path_kind(hidden.key), hidden.path_kind(caller.key)) == (PathKind.CIRCUIT, PathKind.CIRCUIT)
    async with await caller.open_stream(hidden.key, Lane.BULK) as stream:
        await stream.send_all(b"hello")
        assert await stream.receive_some() == b"hello"
    await nursery.start(caller.serve, echo)
    assert await hidden.probe(caller.key, caller.address)
    assert hidden.path_kind(caller.key) is PathKind.DIALED  # the probe's connection replaced the circuit
    await caller.disconnect(hidden.key)
    network.kill(relay.key)
    with pytest.raises(Unreachable):
        await caller.connect(hidden.key, [through])


async def test_a_closed_connection_delivers_what_was_sent_and_then_breaks(
    autojump_clock: trio.testing.MockClock,
) -> None:
    near, far = pair(Link(delay_s=1.0))
    await near.send_all(b"goodbye")
    network_of(near).close(A.public, B.public)
    assert not network_of(near).joined(A.public, B.public)
    with pytest.raises(trio.BrokenResourceError):
        await near.send_all(b"too late")
    await far.send_all(b"into the void")  # the far end does not know yet
    assert await far.receive_some() == b"goodbye"
    for _ in range(2):
        with pytest.raises(trio.BrokenResourceError):
            await far.receive_some()
    with pytest.raises(trio.BrokenResourceError):
        await far.send_all(b"more")
    with pytest.raises(trio.BrokenResourceError):
        await near.receive_some()


async def test_a_close_is_no_loss_but_a_cut_after_it_is(autojump_clock: trio.testing.MockClock) -> None:
    near, far = pair(Link(delay_s=1.0))
    await near.send_all(b"goodbye")
    network_of(near).close(A.public, B.public)
    network_of(near).cut(A.public, B.public)
    with pytest.raises(trio.BrokenResourceError):
        await far.receive_some()


async def test_a_writer_that_waits_for_room_learns_of_a_close(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    near, far = pair(Link(delay_s=1.0, buffer_bytes=100))
    nursery.start_soon(far.send_all, bytes(1000))
    await trio.sleep(0.1)
    network_of(near).close(A.public, B.public)  # what it sends from now on is lost, so that it waits no more
    await trio.sleep(2.0)
    with pytest.raises(trio.BrokenResourceError):
        await far.send_all(b"more")
