"""A relay, a peer that is reached through it, and a peer that calls it, for tests."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
import trio.testing

from codec.sign import Key
from swarm.protocol.core.reach import circuit
from swarm.transport.base import Lane, PeerKey
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.nat.relay import RelayRules
from swarm.transport.rules import PeerPolicy, TransportRules

ANY = "/ip4/127.0.0.1/tcp/0"
Stream = trio.abc.HalfCloseableStream


async def echo(peer: PeerKey, lane: Lane, stream: Stream) -> None:
    async for data in stream:
        await stream.send_all(data)
    await stream.send_eof()


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - no event to wait for
        await trio.sleep(0.01)


async def ended(stream: trio.abc.ReceiveStream) -> bool:
    """Whether the stream ends or breaks without more data."""
    try:
        return await stream.receive_some() == b""
    except trio.BrokenResourceError:
        return True


@dataclass
class World:
    """A relay, a peer that is reached through it (`hidden`), and a peer that wants to reach that one (`caller`)."""

    relay: Libp2pTransport
    hidden: Libp2pTransport
    caller: Libp2pTransport
    address: str
    """The relay's own address."""
    nursery: trio.Nursery

    async def call(self) -> None:
        await self.caller.connect(self.hidden.key, [circuit(self.address)])


def transport(
    seed: int, via: Sequence[str] = (), *, policy: PeerPolicy | None = None, rules: TransportRules | None = None
) -> Libp2pTransport:
    return Libp2pTransport(Key(bytes([seed]) * 32), [ANY], via=via, policy=policy, rules=rules)


@asynccontextmanager
async def world(
    rules: RelayRules | None = None,
    *,
    may_reserve: Callable[[PeerKey], bool] = lambda peer: True,
    admits: Callable[[PeerKey], bool] | None = None,
    reserve: bool = True,
) -> AsyncIterator[World]:
    """`rules`, `may_reserve`, `admits`: the relay's. `reserve`: wait until `hidden` holds a reservation."""
    policy = PeerPolicy(admits=admits, may_reserve=may_reserve)
    relay = transport(1, policy=policy, rules=TransportRules(relay=rules or RelayRules()))
    with trio.fail_after(15):
        async with trio.open_nursery() as nursery:
            (address,) = await nursery.start(relay.serve, echo)
            hidden, caller = transport(2, via=[address]), transport(3)
            await nursery.start(hidden.serve, echo)
            await nursery.start(caller.serve, echo)
            peers = World(relay, hidden, caller, address, nursery)
            if reserve:
                await until(lambda: not hidden.reservations.state[address])
            yield peers
            nursery.cancel_scope.cancel()


async def exchange(stream: Stream, data: bytes, pause_s: float = 0.0) -> bytes:
    """Send `data`, 64 KiB at a time, and return what comes back."""
    back = bytearray()

    async def send() -> None:
        for at in range(0, len(data), 65_536):
            await stream.send_all(data[at : at + 65_536])
            await trio.sleep(pause_s)
        await stream.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send)
        async for part in stream:
            back += part
    return bytes(back)
