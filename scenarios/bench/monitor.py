"""Measures what a scrape of metrics, and a look at the page, cost a process: made-up swarms of 64 to 10,000 members.

    python -m scenarios.bench.monitor [--members 64 1000 10000] [--json]
    python -m scenarios.bench.monitor --serve 64     # serves the page of a made-up swarm, to be looked at

*scrape*: processor time to turn a status into OpenMetrics text. *look*: to turn it into the JSON that the page asks for
once a second, with the sentences about what is wrong. *frame*: memory of one status in the page's history.
"""

import argparse
import json
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from node.monitor import serve_monitor
from node.monitor.findings import findings, headline
from node.monitor.metrics import exposition
from node.monitor.monitor import Answer, Seen
from node.monitor.observations import Observations
from scenarios.harness.made_up_swarm import made_up_status

__all__ = ["main", "measure"]

REPEATS = 9
STARTS_AT_S = 700.0
"""Seconds after the start of the made-up run, so that there are versions to show."""


def measure(members: int) -> dict[str, Any]:
    """Return the costs for a swarm of this size, in ms of processor time (the median) and bytes."""
    status, seen = made_up_status(members, STARTS_AT_S), Observations()
    seen.look(status)

    def look() -> bytes:
        return msgspec.json.encode(Seen(0.0, headline(status), findings(status), status))

    return {
        "members": members,
        "scrape_ms": _median_ms(lambda: exposition(status, seen, "0")),
        "scrape_bytes": len(exposition(status, seen, "0")[0]),
        "look_ms": _median_ms(look),
        "look_bytes": len(look()),
        "frame_bytes": len(zlib.compress(look(), 6)),
    }


def _median_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


async def _serve(members: int, port: int) -> None:
    began = time.monotonic()

    async def source() -> Answer:
        await trio.lowlevel.checkpoint()
        return Answer(made_up_status(members, STARTS_AT_S + time.monotonic() - began))

    with tempfile.TemporaryDirectory() as home:
        async with trio.open_nursery() as nursery:
            print(await nursery.start(serve_monitor, ("127.0.0.1", port), Path(home), source), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[64, 1000, 10_000])
    parser.add_argument("--serve", type=int, metavar="N", help="serve the page of a made-up swarm of N members instead")
    parser.add_argument("--port", type=int, default=0, help="for --serve (default: any free one)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.serve is not None:
        trio.run(_serve, options.serve, options.port)
        return 0
    rows = [measure(members) for members in options.members]
    if options.json:
        print(json.dumps({"rows": rows}))
        return 0
    print(f"{'members':>8} {'scrape ms':>10} {'bytes':>8} {'look ms':>9} {'bytes':>10} {'frame bytes':>12}")
    for row in rows:
        print(f"{row['members']:8d} {row['scrape_ms']:10.2f} {row['scrape_bytes']:8d} {row['look_ms']:9.2f} "
              f"{row['look_bytes']:10d} {row['frame_bytes']:12d}")  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
