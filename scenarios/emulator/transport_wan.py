"""What one edge reaches over a long path: the rows of `scenarios.bench.transport` that need the WAN emulator, and so
root.

    python -m scenarios.emulator.transport_wan [--row NAME ...] [--json]

Two processes on two emulated hosts. Links have queues of one bandwidth-delay product, MTU 1500, and sockets the 6 MB
and 4 MB that distributions allow. Rates are what the receiver's program got, without any header.

| row | path | is |
|---|---|---|
| gigabit | 100 ms, 1 Gbit/s | as many connections as `Transport.target_connections` says: share of the link in the
third second | | gigabit-one | the same | one connection |
| gigabit-stock | the same | py-libp2p as it comes |
| loss | 200 ms, 200 Mbit/s, 1e-4 lost | share of the link |
| loss-reno | the same | where the system lets nobody choose BBR |
| idle | 100 ms, 200 Mbit/s | 10 MiB after a minute of silence, against the same at once after another |
| idle-reno | the same | where the system lets nobody choose BBR |

`control p95` is a 1 KB message on the control lane and its echo while bulk fills the link. `first byte` is in round
trips, from nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from codec.errors import UsageError
from scenarios.emulator.network import Host, Network

__all__ = ["ROWS", "Row", "main", "measure"]

_MTU: Final = 1500
_HEADERS: Final = 52
"""IP and TCP with timestamps. A program gets (MTU - headers) / MTU of the link at best, less 0.3 % for TLS."""


@dataclass(frozen=True, slots=True)
class Row:
    """One path and what is done on it."""

    rtt_ms: float
    mbit: float
    loss: float = 0.0
    kind: str = "ours"
    target_connections: int | None = None
    """Connections; None: as `Transport.target_connections` says."""
    congestion: str | None = None
    """What our sockets get; None: what they choose."""
    seconds: float = 8.0
    """How long to push; 0: see `idle_s`."""
    idle_s: float = 0.0
    """Three times 10 MiB, a pause of so long, and 10 MiB again."""


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
        options["address"] = _line(server)["address"].replace("0.0.0.0", far.address)
        pusher = _end(near, "push", options)
        told = _line(pusher)
        arrivals = _line(server)["arrivals"] if row.seconds else []
        drops = near.sums.queue_drops + far.sums.queue_drops
    told["queue_drops"] = drops
    told["path"] = f"{row.rtt_ms:g} ms, {row.mbit:g} Mbit/s" + (f", {row.loss:g} lost" if row.loss else "")
    if "first_byte_s" in told:
        told["first_byte_round_trips"] = round(told.pop("first_byte_s") / row.rtt_ms * 1e3, 2)
    if row.seconds:
        told |= _rates(arrivals, row.mbit)
    else:
        warm_s = statistics.median(told["warm_s"][1:])
        told["x_warm"] = round(told["cold_s"] / warm_s, 2)
    return told


def _rates(arrivals: Sequence[tuple[float, int]], mbit: float) -> dict[str, Any]:
    """From (seconds since the start, bytes since then): the share of the link by second, and in the long run."""

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


def _line(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended early: {process.args}")
    return json.loads(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", choices=list(ROWS), help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        report = {name: measure(ROWS[name]) for name in arguments.row or ROWS}
    except UsageError as error:
        raise SystemExit(str(error)) from None
    print(json.dumps(report) if arguments.json else table(report))


def table(report: dict[str, dict[str, Any]]) -> str:
    """The rows, for people."""
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
