"""The two processes of `scenarios.emulator.transport_wan`: one serves, one pushes, each on an emulated host.

Run as `python -m scenarios.emulator.transport_wan_ends serve|push JSON`. Both ends share the machine's clock.
"""

import json
import logging
import os
import sys
import time
from typing import Any, Final

import trio

from codec.sign import Key

_PIECE_BYTES: Final = 1 << 17
_IDLE_BYTES: Final = 10 << 20
_PUSHER, _SERVER = Key(bytes([1]) * 32), Key(bytes([2]) * 32)
_LISTEN: Final = "/ip4/0.0.0.0/tcp/4701"
_READ_BYTES: Final = 1 << 18
_SAMPLE_S: Final = 0.05
_START: Final = b"now"


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _use(congestion: str | None) -> None:
    """Make our sockets use this congestion control, as they do where the system allows no other."""
    if congestion:
        from swarm.transport import tuning

        tuning._CHOSEN = congestion.encode()  # type: ignore[misc]


class Arrivals:
    """Counts received bytes and, from `begin` on, samples the count over time and prints the samples."""

    def __init__(self, seconds: float) -> None:
        self.bytes = 0
        self._seconds = seconds
        self._start = trio.Event()

    def begin(self) -> None:
        self._start.set()

    async def run(self) -> None:
        await self._start.wait()
        start_s, before = time.monotonic(), self.bytes
        samples = []
        while (passed_s := time.monotonic() - start_s) < self._seconds:
            samples.append((round(passed_s, 3), self.bytes - before))
            await trio.sleep(_SAMPLE_S)
        samples.append((self._seconds, self.bytes - before))
        _say(arrivals=samples)


# Ours.


async def _serve_ours(options: dict[str, Any]) -> None:
    from swarm.transport.base import Lane, PeerKey
    from swarm.transport.libp2p import Libp2pTransport

    transport = Libp2pTransport(_SERVER, [_LISTEN])
    arrivals = Arrivals(options["seconds"])

    async def accept(peer: PeerKey, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
        async for data in stream:
            if lane is Lane.BULK:
                arrivals.bytes += len(data)
                if data[-1:] == b"\1":  # the end of one load
                    await stream.send_all(b"!")
            else:
                if data == _START:
                    arrivals.begin()
                await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        addresses = await nursery.start(transport.serve, accept)
        _say(address=addresses[0])
        await arrivals.run()
        await trio.sleep_forever()


async def _push_ours(options: dict[str, Any]) -> None:
    from swarm.transport.base import Lane
    from swarm.transport.libp2p import Libp2pTransport

    transport = Libp2pTransport(_PUSHER, [_LISTEN], up_mbit=options["mbit"])

    async def ignore(*_: object) -> None: ...

    async with trio.open_nursery() as nursery:
        await nursery.start(transport.serve, ignore)
        start_s = time.monotonic()
        await transport.connect(_SERVER.public, [options["address"]])
        control = await transport.open_stream(_SERVER.public, Lane.CONTROL)
        await control.send_all(b"?")
        await control.receive_some(1)
        report: dict[str, Any] = {"first_byte_s": time.monotonic() - start_s}
        await trio.sleep(1)  # until the transport has measured the round trip
        report["ways"] = options["ways"] or transport.target_connections(_SERVER.public)
        streams = [await transport.open_stream(_SERVER.public, Lane.BULK) for _ in range(report["ways"])]
        report["congestion"] = transport.congestion_control(_SERVER.public)
        if options["seconds"]:
            report["control_p95_ms"] = await _saturate(control, streams, options["seconds"])
        else:
            times_s = [await _load(streams, _IDLE_BYTES) for _ in range(4)]
            await trio.sleep(options["idle_s"])
            report |= {"warm_s": times_s, "cold_s": await _load(streams, _IDLE_BYTES)}
        _say(**report)
        await trio.sleep_forever()


async def _saturate(control: trio.abc.Stream, streams: list[Any], seconds: float) -> float:
    """Push on every stream while sending messages on the control lane. Returns the 95th percentile of the control
    messages' round trips, in ms."""
    piece, waits_ms = bytes(_PIECE_BYTES), list[float]()

    async def push(stream: Any) -> None:
        while True:
            await stream.send_all(piece)

    await control.send_all(_START)
    await control.receive_some(len(_START))
    async with trio.open_nursery() as pushing:
        for stream in streams:
            pushing.start_soon(push, stream)
        until_s = trio.current_time() + seconds + 1
        while trio.current_time() < until_s:
            start_s = time.monotonic()
            await control.send_all(bytes(1000))
            left = 1000
            while left:
                left -= len(await control.receive_some(left))
            waits_ms.append((time.monotonic() - start_s) * 1e3)
            await trio.sleep(0.05)
        pushing.cancel_scope.cancel()
    return round(sorted(waits_ms)[int(0.95 * len(waits_ms))], 1)


async def _load(streams: list[Any], length: int) -> float:
    """Push `length` bytes over all streams; each stream takes the next piece as soon as it is free.

    Returns the seconds until the far end has received everything.
    """
    left = length // _PIECE_BYTES
    piece, last = bytes(_PIECE_BYTES), b"\1"
    start_s = time.monotonic()

    async def push(stream: Any) -> None:
        nonlocal left
        while left:
            left -= 1
            await stream.send_all(piece)
        await stream.send_all(last)
        await stream.receive_some(1)

    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(push, stream)
    return time.monotonic() - start_s


# Unmodified py-libp2p.


async def _serve_stock(options: dict[str, Any]) -> None:
    import libp2p
    from libp2p.custom_types import TProtocol
    from multiaddr import Multiaddr

    host = libp2p.new_host(listen_addrs=[Multiaddr(_LISTEN)])
    arrivals = Arrivals(options["seconds"])

    async def take(stream: Any) -> None:
        arrivals.begin()
        while True:
            arrivals.bytes += len(await stream.read(_READ_BYTES))

    host.set_stream_handler(TProtocol("/scenario/1"), take)
    async with host.run([Multiaddr(_LISTEN)]), trio.open_nursery() as nursery:
        _say(address=f"{_LISTEN}/p2p/{host.get_id()}")
        nursery.start_soon(arrivals.run)
        await trio.sleep_forever()


async def _push_stock(options: dict[str, Any]) -> None:
    import libp2p
    from libp2p.custom_types import TProtocol
    from libp2p.peer.peerinfo import info_from_p2p_addr
    from multiaddr import Multiaddr

    host = libp2p.new_host()
    piece = bytes(_PIECE_BYTES)
    async with host.run([]):
        info = info_from_p2p_addr(Multiaddr(options["address"]))
        start_s = time.monotonic()
        await host.connect(info)
        stream = await host.new_stream(info.peer_id, [TProtocol("/scenario/1")])
        opened_s = time.monotonic() - start_s
        with trio.move_on_after(options["seconds"] + 1):
            while True:
                await stream.write(piece)
        _say(ways=1, opened_s=round(opened_s, 3))
        await trio.sleep_forever()


_ENDS: Final = {
    ("serve", "ours"): _serve_ours,
    ("push", "ours"): _push_ours,
    ("serve", "stock"): _serve_stock,
    ("push", "stock"): _push_stock,
}


def main() -> None:
    side, options = sys.argv[1], json.loads(sys.argv[2])
    logging.disable(logging.CRITICAL)
    _use(options["congestion"])
    trio.run(_ENDS[side, options["kind"]], options)
    os._exit(0)


if __name__ == "__main__":
    main()
