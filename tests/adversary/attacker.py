"""Attacks, run by `attack_kit` as a process of its own: one JSON argument says what; each line out says how it went."""

import itertools
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import trio
from peer_kit import GONE, Member
from stranger_kit import (
    BROKEN,
    HEADER,
    WINDOW,
    certificate,
    context,
    control_stream,
    empty_frames,
    frame,
    pings,
    quietly,
    said,
    secured,
    sources,
    streams_opened_and_reset,
    tcp,
)
from traffic_kit import BULK, CONTROL, GOSSIP, REPLAY, gossip

from codec.sign import Key
from node.settings.ticket import Ticket
from swarm.transport.base import Lane

AT_ONCE = 65536
"""Bytes a write."""
AGAIN_S = 0.5
"""Whoever was thrown out comes back after this."""


class Told:
    """What is reported once a second."""

    def __init__(self, mbit: float, most_s: float) -> None:
        self.sent_bytes = self.thrown_out = self.refused = self.connections = self.begun = 0
        """`begun`: members that have sent something of what they are to send, or were kept from it."""
        self._bytes_s = mbit * 1e6 / 8
        self._until_s = trio.current_time() + most_s
        self._next_s = trio.current_time()

    async def pace(self, size: int) -> None:
        """Wait until all attackers together may send so much more."""
        now = trio.current_time()
        self._next_s = max(self._next_s, now - 0.2) + size / self._bytes_s
        await trio.sleep_until(self._next_s)

    async def report(self) -> None:
        while trio.current_time() < self._until_s:
            counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            print(json.dumps(counts), flush=True)
            await trio.sleep(1)
        sys.exit(0)


async def send(stream: Any, blocks: Iterator[bytes], told: Told) -> None:
    """Until the other end hangs up."""
    for number, block in enumerate(blocks):
        told.begun += not number
        for at in range(0, len(block), AT_ONCE):
            part = block[at : at + AT_ONCE]
            await told.pace(len(part))
            await stream.send_all(part)
            told.sent_bytes += len(part)


# ------------------------------------------------------------ members


async def member_attacks(order: dict[str, Any], told: Told) -> None:
    async def one(i: int) -> None:
        member = Member(Key(bytes([i + 1]) + b"\xaa" * 31), order["ticket"], name=f"sybil-{i}")
        member.keeps_bulk = order["what"] == REPLAY
        async with member.running():
            while True:
                if await member.enter():
                    with quietly(*GONE, trio.TooSlowError):  # thrown out, or kept waiting
                        await act(order, member, told)
                    told.thrown_out += 1
                else:
                    told.refused += 1
                    told.begun += 1
                await member.transport.disconnect(member.seed)
                if order["at_box"]:
                    await member.transport.disconnect(bytes.fromhex(order["box"]))
                await trio.sleep(AGAIN_S)

    async with trio.open_nursery() as nursery:
        for i in range(order["members"]):
            nursery.start_soon(one, i)


async def act(order: dict[str, Any], member: Member, told: Told) -> None:
    what = order["what"]
    if what in CONTROL and order["at_box"]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(member.live)  # it stays a member, or the node would not listen to it
            stream = await member.greet(bytes.fromhex(order["box"]), order["box_port"])
            await send(stream, CONTROL[what](member), told)
    elif what in CONTROL:
        await send(member.stream, CONTROL[what](member), told)
    elif what in BULK:
        stream = await member.transport.open_stream(member.seed, Lane.BULK)
        await send(stream, BULK[what](member), told)
    elif what == GOSSIP:
        stream = await member.transport.open_protocol_stream(member.seed, "/meshsub/1.1.0")
        await send(stream, gossip(member), told)
    elif what == REPLAY:
        await replay(order, member, told)
    else:
        await by_hand(order, member.key, told, FRAMES[what])


async def replay(order: dict[str, Any], member: Member, told: Told) -> None:
    """Keep what the seed pushes of a version, and give it to the node for ever after."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.live)
        await member.attach(*range(8))
        told.begun += 1  # what it is to send comes with the next version, which the test publishes after this
        while not member.bulk or len(member.manifests) == 0:  # noqa: ASYNC110
            await trio.sleep(0.1)
        await trio.sleep(1)
        box = bytes.fromhex(order["box"])
        await member.greet(box, order["box_port"])
        stream = await member.transport.open_stream(box, Lane.BULK)
        await send(stream, itertools.repeat(member.bulk), told)


# ------------------------------------------------------------ strangers, or members by hand

FRAMES: dict[str, Any] = {
    "empty frames": lambda: itertools.repeat(empty_frames(5000)),
    "pings": lambda: itertools.repeat(pings(1000)),
    "unknown streams": lambda: itertools.repeat(frame(0, 0, 99, body=b"x") * 1000),
    "streams opened and reset": lambda: (streams_opened_and_reset(500, 3 + 1000 * i) for i in itertools.count()),
    "streams opened, negotiated and reset": lambda: opened_and_reset(),
    "empty data frames": lambda: itertools.chain([control_stream(b"")], itertools.repeat(frame(0, 0, 1) * 5000)),
}


def opened_and_reset() -> Iterator[bytes]:
    hello = said(HEADER, "/swarm-node/control/1")
    for i in itertools.count(3, 2):
        yield frame(WINDOW, 1, i) + frame(0, 0, i, body=hello) + frame(WINDOW, 8, i)


def bulk_streams(count: int) -> bytes:
    """So many bulk streams opened, with nothing on them."""
    hello = said(HEADER, "/swarm-node/bulk/1")
    return b"".join(frame(WINDOW, 1, i) + frame(0, 0, i, body=hello) for i in range(3, 3 + 2 * count, 2))


async def by_hand(order: dict[str, Any], key: Key, told: Told, frames: Any) -> None:
    """Yamux frames on a connection of its own; what comes back is read and forgotten."""
    port = int(Ticket.parse(order["ticket"]).addrs[0].rpartition("/")[2])
    shown = context(certificate(key))
    while True:
        with quietly(*BROKEN):
            tls = await secured(port, shown)
            told.connections += 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drain, tls, nursery.cancel_scope)
                await send(tls, frames(), told)
        told.thrown_out += 1
        await trio.sleep(AGAIN_S)


async def drain(stream: Any, scope: trio.CancelScope) -> None:
    with quietly(*BROKEN):
        while await stream.receive_some(65536):
            pass
    scope.cancel()


async def crowd(order: dict[str, Any], told: Told) -> None:
    """Connections that come and go, or come and stay silent; some with a handshake."""
    port = int(Ticket.parse(order["ticket"]).addrs[0].rpartition("/")[2])
    what, stays_s = order["what"], 30.0 if order["what"] in ("strangers", "early bulk streams") else 0.0
    keys = 200 if what == "early bulk streams" else 8  # what a peer may cost is counted for all of its connections
    shown = [context(certificate(Key(bytes([i + 1]) + b"\xbb" * 31))) for i in range(keys)]
    places = itertools.cycle(list(sources(order["addresses"])))
    limiter = trio.CapacityLimiter((order["count"] and 1500) or 64)

    async def one(i: int) -> None:
        with quietly(*BROKEN):
            if what == "connections" or (what == "strangers" and i % 2):
                stream: Any = await tcp(port, next(places))
            else:
                stream = await secured(port, shown[i % len(shown)], next(places))
                await stream.send_all(control_stream(b"") + (bulk_streams(5) if what == "early bulk streams" else b""))
            told.connections += 1
            with trio.move_on_after(stays_s):
                await drain(stream, trio.CancelScope())
            await trio.aclose_forcefully(stream)

    async def turn(i: int) -> None:
        async with limiter:
            with trio.move_on_after(60):
                await one(i)

    async with trio.open_nursery() as nursery:
        for i in itertools.count():
            while limiter.available_tokens <= 0:  # noqa: ASYNC110
                await trio.sleep(0.005)
            nursery.start_soon(turn, i)
            await told.pace(20_000)  # a thousand a second at most, of 100 Mbit/s


async def main() -> None:
    order = json.loads(sys.argv[1])
    os.nice(19)  # what is measured is what it makes the victim do, and not whom it keeps from the processor
    told = Told(order["mbit"], order["seconds"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(told.report)
        if order["members"]:
            await member_attacks(order, told)
        elif order["what"] in FRAMES:
            await by_hand(order, Key.generate(), told, FRAMES[order["what"]])
        else:
            await crowd(order, told)


if __name__ == "__main__":
    trio.run(main)
