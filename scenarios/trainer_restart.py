"""The trainer is killed while it extracts, deals, seals, and afterwards, and starts again: does every node end with the
same bits, is a dead attempt forgotten, and what does it cost?

    python -m scenarios.trainer_restart --nodes 32
"""

import json
import sys
from typing import Any, Final

from codec import chunk_target, piece_target
from scenarios.crowd import HEADER_BYTES, Crowd, gather
from scenarios.rows import crowd_of, parser
from swarm.protocol.events import VersionId

__all__ = ["MOMENTS", "main", "restart"]

MOMENTS: Final = {"extracting": 0.1, "dealing": 0.5, "sealing": 1.0, "after": 2.0}
"""When it is killed, in times of what the trainer's uplink takes for the payload."""


def restart(crowd: Crowd, payload_bytes: int, seed: int, moment: str, away_s: float) -> dict[str, Any]:
    """One version, in whose middle the trainer is killed. Unless its seal was out, a second attempt follows."""
    world = gather(crowd, seed)
    chunk, piece = chunk_target(payload_bytes), piece_target(payload_bytes)
    sizes = {"chunks": max(1, payload_bytes // chunk), "chunk_bytes": chunk - HEADER_BYTES, "piece_bytes": piece}
    sealed = moment in ("sealing", "after")
    uplink_s = payload_bytes * 8e-6 / crowd.trainer_mbit
    began = world.now
    first = world.publish(**sizes, spread_s=uplink_s if moment == "extracting" else 0.0, seal=sealed)
    world.run(world.now + uplink_s * MOMENTS[moment])
    world.restart_authority()
    world.run(world.now + away_s)
    if not sealed:
        before = world.authority.socket_bytes
        again = world.publish(**sizes, attempt=1)
    else:
        before, again = 0, first
    id_: VersionId = again.id
    whole = world.run_until(lambda: world.all_hold(id_), 120, 0.05)
    stale = {key.attempt for node in world.members() for key in node.headers if (key.epoch, key.version) == id_}
    return {
        "moment": moment,
        "nodes": crowd.nodes,
        "all_hold": whole,
        "same_bits": len({node.root for node in world.members()}) == 1,
        "attempts_left": sorted(stale),
        "seconds": world.now - began,
        "second_attempt_copies": None if sealed else (world.authority.socket_bytes - before) / again.payload_bytes,
    }


def main(arguments: list[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--nodes", type=int, default=32)
    made.add_argument("--moment", choices=tuple(MOMENTS), action="append", help="only then (may be repeated)")
    made.add_argument("--away-s", type=float, default=5.0, help="how long it is gone")
    options = made.parse_args(arguments)
    crowd, payload = crowd_of(options, options.nodes), int(options.mib * 2**20)
    found = [
        restart(crowd, payload, seed, moment, options.away_s)
        for moment in options.moment or MOMENTS
        for seed in range(options.seed, options.seed + options.seeds)
    ]
    if options.json:
        print(json.dumps({"scenario": "trainer_restart", "rows": found}, indent=1))
    for row in [] if options.json else found:
        copies = "" if row["second_attempt_copies"] is None else f", {row['second_attempt_copies']:.2f} copies again"
        state = "all hold it" if row["all_hold"] else "NOT ALL HOLD IT"
        print(f"killed while {row['moment']:<11} {state} after {row['seconds']:.1f} s{copies}")
    return 0 if all(row["all_hold"] and row["same_bits"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
