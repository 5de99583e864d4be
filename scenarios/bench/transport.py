"""Measures CPU time and throughput of our transport, of unmodified py-libp2p, and of threads on plain TLS sockets.

    python -m scenarios.bench.transport [--mb 512] [--no-wan] [--json]

Each row runs two processes on this machine, so both ends share its cores. CPU seconds per gigabyte are the robust
figure; megabytes per second depend on other load. `control p95` is the 95th percentile of the round trip of a 1 KB
message on the control lane while bulk runs at full speed. `first byte` counts round trips through a proxy that delays
every byte by half a round trip and, like a real path, the opening of the TCP connection by a whole one. Where the WAN
emulator can run (as root), the rows of `scenarios.emulator.transport_wan` follow; they take four minutes.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import trio

from codec.errors import UsageError
from codec.sign import Key
from scenarios.emulator import transport_wan
from scenarios.emulator.network import check_privileges
from scenarios.harness.command import json_parser
from scenarios.harness.processes import next_line

__all__ = ["main"]

_KINDS = ("threads", "ours", "ours+hash", "stock")
_RUN_S = 120.0
_ROUND_TRIP_S = 0.1


def measure(kind: str, length: int, streams: int) -> dict[str, Any]:
    """Measure one row: push `length` bytes from one process to another."""
    options: dict[str, Any] = {"bytes": length, "streams": streams}
    with _start("serve", kind, options) as server:
        try:
            options["address"] = json.loads(next_line(server, within_s=_RUN_S))["address"]
            with _start("push", kind, options) as pusher:
                try:
                    sender = json.loads(next_line(pusher, within_s=_RUN_S))
                    receiver = json.loads(next_line(server, within_s=_RUN_S))
                finally:
                    pusher.kill()
        finally:
            server.kill()
    return {"kind": kind, "streams": streams, "sender": sender, "receiver": receiver}


def _start(side: str, kind: str, options: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "scenarios.bench.transport_ends", side, kind, json.dumps(options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def first_byte(round_trip_s: float) -> float:
    """Return the round trips from no connection to the first byte back on the control lane of a known peer."""
    from swarm.transport.base import Lane
    from swarm.transport.libp2p import Libp2pTransport

    near, far = (Libp2pTransport(Key(bytes([n]) * 32), ["/ip4/127.0.0.1/tcp/0"]) for n in (1, 2))

    async def echo(peer: bytes, lane: Lane, stream: trio.abc.HalfCloseableStream) -> None:
        async for data in stream:
            await stream.send_all(data)

    async with trio.open_nursery() as nursery:
        (address,) = await nursery.start(far.serve, echo)
        await nursery.start(near.serve, echo)
        port = int(address.rsplit("/", 1)[1])
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

        async def proxy(client: trio.SocketStream) -> None:
            await trio.sleep(round_trip_s)
            server = await trio.open_tcp_stream("127.0.0.1", port)
            async with trio.open_nursery() as pumps:
                pumps.start_soon(_delayed, client, server, round_trip_s / 2)
                pumps.start_soon(_delayed, server, client, round_trip_s / 2)

        nursery.start_soon(trio.serve_listeners, proxy, [listener])
        through = f"/ip4/127.0.0.1/tcp/{listener.socket.getsockname()[1]}"
        start_s = time.perf_counter()
        await near.connect(far.key, [through])
        stream = await near.open_stream(far.key, Lane.CONTROL)
        await stream.send_all(b"?")
        await stream.receive_some()
        taken_s = time.perf_counter() - start_s
        nursery.cancel_scope.cancel()
    return taken_s / round_trip_s


async def _delayed(source: trio.SocketStream, target: trio.SocketStream, delay_s: float) -> None:
    """Forward all bytes from `source` to `target`, each `delay_s` later."""
    send, receive = trio.open_memory_channel[tuple[float, bytes]](1000)

    async def deliver() -> None:
        async for at_s, data in receive:
            await trio.sleep_until(at_s)
            await target.send_all(data)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(deliver)
        async for data in source:
            await send.send((trio.current_time() + delay_s, bytes(data)))


def main() -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--mb", type=int, default=512, help="megabytes a row (default 512)")
    parser.add_argument("--no-wan", action="store_true", help="leave out the rows over emulated long paths")
    arguments = parser.parse_args()
    length = arguments.mb * 1_048_576
    rows = [measure(kind, length if kind != "stock" else length // 4, 1) for kind in _KINDS]
    rows.append(measure("ours", length, 4))
    threads = rows[0]
    for row in rows:
        for side in ("sender", "receiver"):
            row[side]["x_threads"] = round(row[side]["cpu_s_per_gb"] / threads[side]["cpu_s_per_gb"], 2)
    report = {
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "rows": rows,
        "first_byte_round_trips": round(trio.run(first_byte, _ROUND_TRIP_S), 2),
        "wan": {} if arguments.no_wan else _over_long_paths(),
    }
    if arguments.json:
        print(json.dumps(report))
    else:
        _print(report)


def _over_long_paths() -> dict[str, Any]:
    try:
        check_privileges()
    except UsageError as error:
        print(f"The rows over long paths are left out: {error}", file=sys.stderr)
        return {}
    report = {}
    for name, row in transport_wan.ROWS.items():
        print(f"{name} ...", file=sys.stderr)
        report[name] = transport_wan.measure(row)
    return report


def _print(report: dict[str, Any]) -> None:
    print(f"{'':12}{'streams':>8}{'MB/s':>9}{'send CPU s/GB':>15}{'receive':>9}{'x threads':>15}{'control p95':>13}")
    for row in report["rows"]:
        sender, receiver = row["sender"], row["receiver"]
        p95 = sender.get("control_p95_ms")
        print(
            f"{row['kind']:12}{row['streams']:8}{receiver['mb_s']:9}{sender['cpu_s_per_gb']:15}"
            f"{receiver['cpu_s_per_gb']:9}{sender['x_threads']:8} /{receiver['x_threads']:5}"
            f"{'' if p95 is None else f'{p95} ms':>13}"
        )
    print(f"first byte: {report['first_byte_round_trips']} round trips; {report['cores']} cores, both ends on them")
    if report["wan"]:
        print(transport_wan.table(report["wan"]))


if __name__ == "__main__":
    main()
