"""Libp2p transports on loopback, for tests."""

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from codec.sign import Key
from swarm.transport.base import Accept, Lane, PeerKey
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import TransportRules
from swarm.transport.yamux import YamuxLimits

ANY = "/ip4/127.0.0.1/tcp/0"
Stream = trio.abc.HalfCloseableStream


async def echo(peer: PeerKey, lane: Lane, stream: Stream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def until_ended(stream: Stream) -> None:
    while await stream.receive_some():
        pass


def transport(seed: int, limits: YamuxLimits | None = None) -> Libp2pTransport:
    return Libp2pTransport(Key(bytes([seed]) * 32), [ANY], rules=TransportRules(limits=limits or YamuxLimits()))


@asynccontextmanager
async def two(accept: Accept = echo) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport, list[str]]]:
    """Two transports that serve; the first is connected to the second. The test has ten seconds."""
    a, b = transport(1), transport(2)
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            await nursery.start(a.serve, echo)
            addrs = await nursery.start(b.serve, accept)
            await a.connect(b.key, addrs)
            yield a, b, addrs
            nursery.cancel_scope.cancel()


_CHILD = """
import sys, trio
from codec.sign import Key
from swarm.transport.libp2p import Libp2pTransport
async def main():
    async def accept(peer, lane, stream):
        await trio.sleep_forever()
    async with trio.open_nursery() as nursery:
        child = Libp2pTransport(Key(bytes([7]) * 32), ["/ip4/127.0.0.1/tcp/0"])
        print(*(await nursery.start(child.serve, accept)), flush=True)
trio.run(main)
"""


@asynccontextmanager
async def a_process() -> AsyncIterator[tuple[subprocess.Popen[str], PeerKey, str]]:
    """Another process that serves and sends nothing, its key and its address. It is killed at the end."""
    with subprocess.Popen([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, text=True) as child:  # noqa: ASYNC220
        try:
            assert child.stdout is not None
            address = (await trio.to_thread.run_sync(child.stdout.readline)).strip()
            yield child, Key(bytes([7]) * 32).public, address
        finally:
            child.kill()
