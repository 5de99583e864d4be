"""The throughput of one connection pair over a long path. These rows of `scenarios.bench.transport` need root.

    python -m scenarios.emulator.transport_wan [--row NAME ...] [--json]

Two processes run on two emulated hosts. Links have an MTU of 1500 and queues of one bandwidth-delay product; sockets
have the buffers of Linux distributions (6 MB and 4 MB). Rates count what the receiving program reads, without headers.

| row | path | measures |
|---|---|---|
| gigabit | 100 ms, 1 Gbit/s | share of the link in the third second, with `Transport.target_connections` connections |
| gigabit-one | the same | the same with one connection |
| gigabit-stock | the same | the same with unmodified py-libp2p |
| loss | 200 ms, 200 Mbit/s, 1e-4 lost | share of the link |
| loss-reno | the same | the same where the system does not allow BBR |
| idle | 100 ms, 200 Mbit/s | time of 10 MiB after a minute of silence, over that of 10 MiB right after another |
| idle-reno | the same | the same where the system does not allow BBR |

`control p95` is the 95th percentile of the round trip of a 1 KB message on the control lane while bulk fills the link.
`first byte` is the time from no connection to the first byte back, in round trips.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from codec.errors import UsageError
from scenarios.emulator.network import Host, Network
from scenarios.harness.command import json_parser
from scenarios.harness.processes import next_line

__all__ = ["ROWS", "Row", "main", "measure"]

ENDS_WITHIN_S: Final = 300.0
"""Time limit of the slowest row on two busy cores, s."""
_MTU: Final = 1500
_HEADERS: Final = 52
"""Bytes of IP and TCP headers with timestamps. A program gets at most (MTU - headers) / MTU of the link, less 0.3 % for
TLS."""


@dataclass(frozen=True, slots=True)
class Row:
    """One path and the load on it."""

    rtt_ms: float
    mbit: float
    loss: float = 0.0
    kind: str = "ours"
    target_connections: int | None = None
    """Number of connections; None: `Transport.target_connections`."""
    congestion: str | None = None
    """Congestion control of our sockets; None: the transport's choice."""
    seconds: float = 8.0
    """How long to push; 0: run the idle test of `idle_s` instead."""
    idle_s: float = 0.0
    """Pause of the idle test, which pushes 10 MiB four times, pauses, and pushes 10 MiB again."""


ROWS: Final[dict[str, Row]] = {
    "gigabit": Row(100, 1000),
    "gigabit-one": Row(100, 1000, target_connections=1),
    "gigabit-stock": Row(100, 1000, kind="stock"),
    "loss": Row(200, 200, 1e-4, seconds=15),
    "loss-reno": Row(200, 200, 1e-4, congestion="reno", seconds=15),
    "idle": Row(100, 200, seconds=0, idle_s=60),
    "idle-reno": Row(100, 200, congestion="reno", seconds=0, idle_s=60),
}


def measure(row: Row) -> dict[str, Any]:
    """Run one row. Raises `UsageError` where the emulator cannot run."""
    net = Network(rtt_ms=row.rtt_ms, mtu=_MTU)
    far = net.host("far", up_mbit=row.mbit, down_mbit=row.mbit)
    near = net.host("near", up_mbit=row.mbit, down_mbit=row.mbit, loss=row.loss)
    options = {
        "kind": row.kind,
        "mbit": row.mbit,
        "ways": row.target_connections,
        "congestion": row.congestion,
        "seconds": row.seconds,
        "idle_s": row.idle_s,
    }
    with net:
        server = _end(far, "serve", options)
        options["address"] = json.loads(next_line(server, within_s=ENDS_WITHIN_S))["address"].replace(
            "0.0.0.0", far.address
        )
        pusher = _end(near, "push", options)
        result = json.loads(next_line(pusher, within_s=ENDS_WITHIN_S))
        arrivals = json.loads(next_line(server, within_s=ENDS_WITHIN_S))["arrivals"] if row.seconds else []
        drops = near.sums.queue_drops + far.sums.queue_drops
    result["queue_drops"] = drops
    result["path"] = f"{row.rtt_ms:g} ms, {row.mbit:g} Mbit/s" + (f", {row.loss:g} lost" if row.loss else "")
    if "first_byte_s" in result:
        result["first_byte_round_trips"] = round(result.pop("first_byte_s") / row.rtt_ms * 1e3, 2)
    if row.seconds:
        result |= _rates(arrivals, row.mbit)
    else:
        warm_s = statistics.median(result["warm_s"][1:])
        result["x_warm"] = round(result["cold_s"] / warm_s, 2)
    return result


def _rates(arrivals: Sequence[tuple[float, int]], mbit: float) -> dict[str, Any]:
    """Return the share of the link, by second and after the second second.

    `arrivals`: pairs of seconds since the start and bytes received by then.
    """

    def at(second: float) -> float:
        return max((length for when, length in arrivals if when <= second), default=0)

    whole = int(arrivals[-1][0])
    best = mbit * 1e6 / 8 * (_MTU - _HEADERS) / _MTU
    shares = [round((at(second + 1) - at(second)) * 8 / mbit / 1e6, 3) for second in range(whole)]
    return {
        "share_by_second": shares,
        "share_third_second": shares[2],
        "share_after": round((at(whole) - at(2)) * 8 / mbit / 1e6 / (whole - 2), 3),
        "share_possible": round(best * 8 / mbit / 1e6, 3),
    }


def _end(host: Host, side: str, options: dict[str, Any]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "scenarios.emulator.transport_wan_ends", side, json.dumps(options)]
    return host.popen(command, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--row", action="append", choices=list(ROWS), help="only this one; may be repeated")
    arguments = parser.parse_args()
    try:
        report = {name: measure(ROWS[name]) for name in arguments.row or ROWS}
    except UsageError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(report) if arguments.json else table(report))


def table(report: dict[str, dict[str, Any]]) -> str:
    """Format the rows as a text table."""
    lines = [f"{'':14}{'path':34}{'ways':>5}{'share 3rd s':>12}{'after':>7}{'x warm':>8}{'control p95':>13}  sockets"]
    for name, row in report.items():
        p95 = row.get("control_p95_ms")
        lines.append(
            f"{name:14}{row['path']:34}{row.get('ways', ''):>5}{row.get('share_third_second', ''):>12}"
            f"{row.get('share_after', ''):>7}{row.get('x_warm', ''):>8}{'' if p95 is None else f'{p95} ms':>13}"
            f"  {row.get('congestion', '')}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
