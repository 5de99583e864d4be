"""Peers without a grant, silent, flooding or many: they affect no member and keep no joiner out."""

import gc

import pytest
import trio
from arena_kit import FLOOD_S, FULL, LATE_S, MIB, Arena, observed
from attack_kit import attack
from libp2p.peer.id import ID
from stranger_kit import (
    BROKEN,
    TLS,
    ByHand,
    certificate,
    closed_by_peer,
    context,
    control_stream,
    frame,
    quietly,
    secured,
    sources,
    tcp,
)

from codec.sign import Key
from swarm.transport.base import Lane
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import PeerPolicy

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.alone]


async def crowd(arena: Arena, nursery: trio.Nursery, count: int, addresses: int, say: bytes | None) -> list[object]:
    """Open `count` connections, each with another key; returns those that were accepted, which stay open.

    `say`: bytes to send on a control stream after the handshake; b"": only the handshake; None: nothing.
    """
    held: list[object] = []
    places = list(sources(addresses))
    limiter = trio.CapacityLimiter(16)

    async def one(i: int) -> None:
        with quietly(*BROKEN):
            async with limiter:
                source = places[i % len(places)]
                if say is None:
                    stream = await tcp(arena.seed_port, source)
                else:
                    shown = context(certificate(Key(i.to_bytes(2, "big") + b"\x31" * 30)))
                    stream = await secured(arena.seed_port, shown, source)
                held.append(stream)
            if say is not None:
                async with trio.open_nursery() as talking:
                    hand = ByHand(stream)
                    talking.start_soon(hand.listen)  # a peer that does not answer pings counts as dead
                    if say:
                        await stream.send_all(control_stream(b""))
                        await hand.send(say)
            await trio.sleep_forever()

    for i in range(count):
        nursery.start_soon(one, i)
    before = -1
    with trio.move_on_after(20):
        while len(held) < count and before != len(held):
            before = len(held)
            await trio.sleep(1)
    return held


async def test_09_silent_strangers_keep_no_joiner_out(arena: Arena) -> None:
    """256 connections with a handshake only, from four addresses."""
    async with observed(arena) as observer, trio.open_nursery() as nursery:
        held = await crowd(arena, nursery, 256, 4, b"")
        print(len(held), "strangers")
        observer.reset()
        await arena.lets_in(10.0)
        assert observer.late_s < LATE_S
        nursery.cancel_scope.cancel()
    assert arena.honest_leases_lost() == []


async def test_12_silent_tcp_connections_keep_no_joiner_out(arena: Arena) -> None:
    """64 silent connections from each of eight addresses: ten of ten joins succeed."""
    async with observed(arena), trio.open_nursery() as nursery:
        await crowd(arena, nursery, 512, 8, None)
        for _ in range(10):
            await arena.lets_in(10.0)
        nursery.cancel_scope.cancel()


async def test_11_strangers_hold_little_memory(arena: Arena) -> None:
    """256 strangers each begin a control message of 4 MiB and never complete it."""
    before = arena.process().rss_bytes
    body = (4 << 20).to_bytes(4, "little") + bytes((4 << 20) - 1)
    peak = before
    async with trio.open_nursery() as nursery:
        held = await crowd(arena, nursery, 256, 8, body)
        for _ in range(25):
            peak = max(peak, arena.process().rss_bytes)
            await trio.sleep(0.2)
        nursery.cancel_scope.cancel()
    assert peak - before < 64 * MIB, f"{(peak - before) / MIB:.0f} MiB for {len(held)} strangers"
    arena.unharmed()
    await arena.lets_in()


async def test_11_stranger_with_a_long_message_is_dropped(arena: Arena) -> None:
    shown = context(certificate(Key(b"\x32" * 32)))
    for size in (4 << 20, 9 << 10):
        tls = await secured(arena.seed_port, shown)
        with quietly(*BROKEN):
            await tls.send_all(control_stream(size.to_bytes(4, "little") + bytes(9 << 10)))
        assert await closed_by_peer(tls, 6.0), f"a stranger's message of {size} bytes is waited for"


async def test_silent_stranger_is_dropped_within_seconds(arena: Arena) -> None:
    """Silence after TCP, after multistream, after TLS, and after a control stream was opened."""
    shown = context(certificate(Key(b"\x33" * 32)))

    async def talked(*parts: bytes) -> trio.abc.Stream:
        stream = await tcp(arena.seed_port)
        for part in parts:
            await stream.send_all(part)
        return stream

    tls, up = await secured(arena.seed_port, shown), await secured(arena.seed_port, shown)
    await up.send_all(control_stream(b""))
    gone: dict[str, bool] = {}

    async def watch(name: str, stream: trio.abc.Stream) -> None:
        gone[name] = await closed_by_peer(stream, 15.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, "TCP", await talked())
        nursery.start_soon(watch, "multistream", await talked(TLS))
        nursery.start_soon(watch, "TLS", tls)
        nursery.start_soon(watch, "control stream", up)
    assert all(gone.values()), gone


@pytest.mark.parametrize(
    "what", ["empty frames", *(["unknown streams", "pings", "streams opened and reset"] if FULL else [])]
)
async def test_08_yamux_frames_from_one_stranger(arena: Arena, what: str) -> None:
    async with observed(arena) as observer, attack(arena, what, mbit=100) as flood:
        observer.reset()
        await trio.sleep(FLOOD_S)
        late_s = observer.late_s
    print(what, flood.progress, late_s)
    assert late_s < LATE_S, f"a heartbeat was {late_s:.2f} s late: {flood.progress}"
    assert arena.honest_leases_lost() == []
    await arena.lets_in()


async def test_connection_flood(arena: Arena) -> None:
    """TCP connections, then handshakes, as fast as one process can open and close them."""
    for what in ("connections", "handshakes"):
        async with observed(arena) as observer, attack(arena, what) as flood:
            observer.reset()
            await trio.sleep(FLOOD_S)
            assert observer.late_s < LATE_S, (what, flood.progress)
            await arena.lets_in(10.0)
    assert arena.process().descriptors < 1000


@pytest.mark.long
async def test_bulk_streams_of_strangers(arena: Arena) -> None:
    """Each stranger opens a control stream and five bulk streams, and sends nothing. A regression: each stream polled
    fifty times a second whether its peer was admitted, so the loop only ran timers and members' leases ended."""
    async with observed(arena) as observer, attack(arena, "early bulk streams", count=10_000, addresses=64) as flood:
        observer.reset()
        await trio.sleep(max(FLOOD_S, 8.0))  # longer than a lease
        assert observer.late_s < LATE_S, flood.progress
        await arena.lets_in(10.0)
    assert arena.honest_leases_lost() == []


async def test_18_traffic_tables_forget_strangers() -> None:
    """300 keys connect to one transport and disconnect: it keeps no entry of them."""
    victim = Libp2pTransport(Key(b"\x41" * 32), ["/ip4/127.0.0.1/tcp/0"], policy=PeerPolicy(admits=lambda peer: False))

    async def accept(peer: bytes, lane: Lane, stream: trio.abc.Stream) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(victim.serve, accept)
        port = int(address.rpartition("/")[2])
        for i in range(300):
            tls = await secured(
                port, context(certificate(Key(i.to_bytes(2, "big") + b"\x42" * 30))), f"127.1.0.{i % 250 + 1}"
            )
            await tls.send_all(frame(2, 1, 0, 1))
            await trio.aclose_forcefully(tls)
        await trio.sleep(0.5)
        gc.collect()
        kept = sum(isinstance(found, ID) for found in gc.get_objects())  # keys of tables, ours and the library's
        nursery.cancel_scope.cancel()
    assert kept <= 64


async def test_10_000_strangers_from_1_000_addresses(arena: Arena) -> None:
    """While silent strangers connect, a joiner is admitted within 10 s, and members are not affected."""
    async with observed(arena) as observer, attack(arena, "strangers", count=10_000, addresses=1000) as flood:
        await trio.sleep(1)
        observer.reset()
        for _ in range(3):
            await arena.lets_in(10.0)
        assert observer.late_s < LATE_S, flood.progress
    assert arena.honest_leases_lost() == []
    assert arena.process().descriptors < 2000
    await arena.works()
