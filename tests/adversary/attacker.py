"""The attacker's process, started by `attack_kit`: one JSON argument is the order; each line on stdout is a report."""

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
    negotiation,
    pings,
    quietly,
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
"""Bytes per write."""
AGAIN_S = 0.5
"""An attacker whose session was ended connects again after this, s."""


class Progress:
    """The counts that are reported once a second, and the common rate limit of all attackers."""

    def __init__(self, mbit: float, most_s: float) -> None:
        self.sent_bytes = self.thrown_out = self.refused = self.connections = self.begun = 0
        """`begun`: members that have sent a first block or were refused. `thrown_out`: sessions that were ended."""
        self._bytes_s = mbit * 1e6 / 8
        self._until_s = trio.current_time() + most_s
        self._next_s = trio.current_time()

    async def pace(self, size: int) -> None:
        """Wait until all attackers together may send `size` bytes more."""
        now = trio.current_time()
        self._next_s = max(self._next_s, now - 0.2) + size / self._bytes_s
        await trio.sleep_until(self._next_s)

    async def report(self) -> None:
        while trio.current_time() < self._until_s:
            counts = {name: value for name, value in vars(self).items() if not name.startswith("_")}
            print(json.dumps(counts), flush=True)
            await trio.sleep(1)
        sys.exit(0)


async def send(stream: Any, blocks: Iterator[bytes], progress: Progress) -> None:
    """Send the blocks until the other end closes the connection."""
    for number, block in enumerate(blocks):
        progress.begun += not number
        for at in range(0, len(block), AT_ONCE):
            part = block[at : at + AT_ONCE]
            await progress.pace(len(part))
            await stream.send_all(part)
            progress.sent_bytes += len(part)


# ------------------------------------------------------------ members


async def member_attacks(order: dict[str, Any], progress: Progress) -> None:
    async def one(i: int) -> None:
        member = Member(Key(bytes([i + 1]) + b"\xaa" * 31), order["ticket"], name=f"sybil-{i}")
        member.keeps_bulk = order["what"] == REPLAY
        async with member.running():
            while True:
                if await member.enter():
                    with quietly(*GONE, trio.TooSlowError):  # the session was ended, or the seed did not answer in time
                        await act(order, member, progress)
                    progress.thrown_out += 1
                else:
                    progress.refused += 1
                    progress.begun += 1
                await member.transport.disconnect(member.seed)
                if order["at_box"]:
                    await member.transport.disconnect(bytes.fromhex(order["box"]))
                await trio.sleep(AGAIN_S)

    async with trio.open_nursery() as nursery:
        for i in range(order["members"]):
            nursery.start_soon(one, i)


async def act(order: dict[str, Any], member: Member, progress: Progress) -> None:
    what = order["what"]
    if what in CONTROL and order["at_box"]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(member.live)  # it stays a member; the node refuses others
            stream = await member.greet(bytes.fromhex(order["box"]), order["box_port"])
            await send(stream, CONTROL[what](member), progress)
    elif what in CONTROL:
        await send(member.stream, CONTROL[what](member), progress)
    elif what in BULK:
        stream = await member.transport.open_stream(member.seed, Lane.BULK)
        await send(stream, BULK[what](member), progress)
    elif what == GOSSIP:
        stream = await member.transport.open_protocol_stream(member.seed, "/meshsub/1.1.0")
        await send(stream, gossip(member), progress)
    elif what == REPLAY:
        await replay(order, member, progress)
    else:
        await by_hand(order, member.key, progress, FRAMES[what])


async def replay(order: dict[str, Any], member: Member, progress: Progress) -> None:
    """Keep the frames that the seed pushes of a version, and send them to the node again and again."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.live)
        await member.attach(*range(8))
        progress.begun += 1  # its frames come with the next version, which the test publishes after this
        while not member.bulk or len(member.manifests) == 0:  # noqa: ASYNC110
            await trio.sleep(0.1)
        await trio.sleep(1)
        box = bytes.fromhex(order["box"])
        await member.greet(box, order["box_port"])
        stream = await member.transport.open_stream(box, Lane.BULK)
        await send(stream, itertools.repeat(member.bulk), progress)


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
    hello = negotiation(HEADER, "/swarm-node/control/1")
    for i in itertools.count(3, 2):
        yield frame(WINDOW, 1, i) + frame(0, 0, i, body=hello) + frame(WINDOW, 8, i)


def bulk_streams(count: int) -> bytes:
    """`count` bulk streams, opened and left empty."""
    hello = negotiation(HEADER, "/swarm-node/bulk/1")
    return b"".join(frame(WINDOW, 1, i) + frame(0, 0, i, body=hello) for i in range(3, 3 + 2 * count, 2))


async def by_hand(order: dict[str, Any], key: Key, progress: Progress, frames: Any) -> None:
    """Send yamux frames on a separate connection; answers are read and discarded."""
    port = int(Ticket.parse(order["ticket"]).addrs[0].rpartition("/")[2])
    shown = context(certificate(key))
    while True:
        with quietly(*BROKEN):
            tls = await secured(port, shown)
            progress.connections += 1
            async with trio.open_nursery() as nursery:
                nursery.start_soon(drain, tls, nursery.cancel_scope)
                await send(tls, frames(), progress)
        progress.thrown_out += 1
        await trio.sleep(AGAIN_S)


async def drain(stream: Any, scope: trio.CancelScope) -> None:
    with quietly(*BROKEN):
        while await stream.receive_some(65536):
            pass
    scope.cancel()


async def crowd(order: dict[str, Any], progress: Progress) -> None:
    """Open connections that are closed again, or stay silent; some with a handshake."""
    port = int(Ticket.parse(order["ticket"]).addrs[0].rpartition("/")[2])
    what, stays_s = order["what"], 30.0 if order["what"] in ("strangers", "early bulk streams") else 0.0
    keys = 200 if what == "early bulk streams" else 8  # budgets count all connections of a peer
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
            progress.connections += 1
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
            await progress.pace(20_000)  # a thousand a second at most, of 100 Mbit/s


async def main() -> None:
    order = json.loads(sys.argv[1])
    os.nice(19)  # measure the victim's work, not the CPU time that the attacker takes from it
    progress = Progress(order["mbit"], order["seconds"])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(progress.report)
        if order["members"]:
            await member_attacks(order, progress)
        elif order["what"] in FRAMES:
            await by_hand(order, Key.generate(), progress, FRAMES[order["what"]])
        else:
            await crowd(order, progress)


if __name__ == "__main__":
    trio.run(main)
