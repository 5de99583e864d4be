"""Measures the share and the delay of announcements that reach every peer when one peer publishes at a steady rate.

    python -m scenarios.bench.gossip [--peers 8] [--per-s 50] [--seconds 10] [--bytes 1000] [--json]

All peers run in one process. Each connects only to its two predecessors, so messages have to be forwarded. With
py-libp2p's defaults three of four messages are lost at 50 per second (its spam guard) or when several arrive at once
(its queue of 32).
"""

import json
from typing import Any

import trio

from codec.sign import Key
from scenarios.harness.command import json_parser
from swarm.gossip.announcements import Gossip
from swarm.transport.libp2p import Libp2pTransport

__all__ = ["main"]


async def measure(peers: int, per_s: float, seconds: float, length: int) -> dict[str, Any]:
    """Return the smallest share of messages that a peer received, and percentiles of their delays in ms."""
    transports = [Libp2pTransport(Key(bytes([n + 1]) * 32), ["/ip4/127.0.0.1/tcp/0"]) for n in range(peers)]
    gossips = [Gossip(each, "scenario", lambda data: len(data) == length) for each in transports]
    sent: dict[bytes, float] = {}
    took_ms: list[list[float]] = [[] for _ in gossips]

    async def ignore(*_: object) -> None: ...

    async with trio.open_nursery() as nursery:

        async def hear(index: int, *, task_status: trio.TaskStatus[None]) -> None:
            def deliver(data: bytes) -> None:
                if data in sent:
                    took_ms[index].append((trio.current_time() - sent[data]) * 1e3)

            await gossips[index].run(deliver, task_status=task_status)

        addrs = [await nursery.start(each.serve, ignore) for each in transports]
        for index, each in enumerate(transports):
            await nursery.start(hear, index)
            for back in (1, 2):
                if index >= back:
                    await each.connect(transports[index - back].key, addrs[index - back])
        await trio.sleep(5)  # for the mesh to form
        start_s, count = trio.current_time(), round(per_s * seconds)
        for number in range(count):
            await trio.sleep_until(start_s + number / per_s)
            data = number.to_bytes(8, "big") * (length // 8) + bytes(length % 8)
            sent[data] = trio.current_time()
            await gossips[0].publish(data)
        with trio.move_on_after(30):  # a late message is not a lost one
            while min(map(len, took_ms[1:])) < count:  # noqa: ASYNC110
                await trio.sleep(0.1)
        nursery.cancel_scope.cancel()
    every = sorted(each for other in took_ms[1:] for each in other)
    return {
        "peers": peers,
        "per_s": per_s,
        "sent": count,
        "least_heard_share": round(min(len(other) for other in took_ms[1:]) / count, 4),
        "p50_ms": round(every[len(every) // 2], 1) if every else None,
        "p95_ms": round(every[int(0.95 * len(every))], 1) if every else None,
    }


def main() -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--peers", type=int, default=8)
    parser.add_argument("--per-s", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--bytes", type=int, default=1000)
    arguments = parser.parse_args()
    report = trio.run(measure, arguments.peers, arguments.per_s, arguments.seconds, arguments.bytes)
    if arguments.json:
        print(json.dumps(report))
    else:
        print(
            f"{report['sent']} messages, {report['per_s']:g} a second, {report['peers']} peers: each heard at least "
            f"{100 * report['least_heard_share']:g} %; p50 {report['p50_ms']} ms, p95 {report['p95_ms']} ms"
        )


if __name__ == "__main__":
    main()
