"""Kills the trainer at one of four moments of a publish, and restarts it from its disk.

    python -m scenarios.trainers.trainer_restart --nodes 32
    python -m scenarios.trainers.trainer_restart --moment sealing --moment after --seeds 3

    extracting  the attempt has begun, and no chunk of it has been assigned
    dealing     half of the chunks have been made and assigned, and there is no seal
    sealing     all chunks are stored; the seal is on disk, and has been sent to no node
    after       the seal has been sent: at least one node has it, and not all nodes have the version

A restarted trainer whose disk holds the seal starts with the sealed version (`swarm.runtime.publishing`). Otherwise it
publishes the version again, as attempt 1, five seconds after its restart. Trainer and nodes run the product's protocol.
The rest is modelled: the trainer makes chunks at intervals at which its uplink can just send them, and stores each at
once; its leases, chunks and seal are on its disk; it is silent for `--away-s`.

*chunks*: chunks of the attempt of which a node had received the header when the trainer was killed. *knew*: nodes that
had the seal then. *seconds*: from the start of the first attempt until the last node has the version. *again*: copies
that the trainer sent for the second attempt.

Exits with 1 if a node lacks the version at the end, or if nodes have different bits.
"""

import sys
from typing import Any, Final

from codec import chunk_target, piece_target
from scenarios.sim.crowd import HEADER_BYTES, Crowd, gather
from scenarios.sim.rows import crowd_of, number, parser, show, verdict
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Published

__all__ = ["MOMENTS", "main", "restart"]

MOMENTS: Final = ("extracting", "dealing", "sealing", "after")
SEALED: Final = ("sealing", "after")
LOAD_S: Final = 5.0
"""Time from the restart of the seed to the second attempt, in which a trainer loads a model and makes a step."""
PATIENCE_S: Final = 120
COLUMNS: Final = {
    "killed while": lambda row: row["moment"],
    "seed": number("seed", "d"),
    "N": number("nodes", "d"),
    "chunks": number("chunks_out", "d"),
    "knew": number("knew_seal", "d"),
    "seconds": number("seconds", ".1f"),
    "again": lambda row: "" if row["second_attempt_copies"] is None else f"{row['second_attempt_copies']:.2f}",
    "missing": number("missing", "d"),
    "same bits": lambda row: "yes" if row["same_bits"] else "NO",
}


def _knew_seal(world: World, published: Published) -> int:
    """Count the nodes that have the version's seal."""
    versions = [node.core.state.chunks.version(published.id) for node in world.members()]
    return sum(version is not None and version.manifest is not None for version in versions)


def _until(world: World, moment: str, sizes: dict[str, Any], uplink_s: float) -> Published | None:
    """Begin to publish and advance the clock to this moment. Returns what was published, or None before the first
    chunk."""
    if moment == "extracting":
        world.run(world.now + uplink_s / 2)
        return None
    begun = world.publish(**sizes, spread_s=uplink_s, seal=moment == "after")
    world.run(begun.at + (uplink_s / 2 if moment == "dealing" else uplink_s))
    if moment == "after":
        world.run_until(lambda: _knew_seal(world, begun) > 0, uplink_s)
    return begun


def restart(crowd: Crowd, payload_bytes: int, seed: int, moment: str, away_s: float) -> dict[str, Any]:
    """Kill the trainer while it publishes one version, and restart it; without a seal on disk it makes a second
    attempt."""
    world = gather(crowd, seed)
    chunk, piece = chunk_target(payload_bytes), piece_target(payload_bytes)
    sizes: dict[str, Any] = {
        "chunks": max(1, payload_bytes // chunk),
        "chunk_bytes": chunk - HEADER_BYTES,
        "piece_bytes": piece,
    }
    began = world.now
    begun = _until(world, moment, sizes, payload_bytes * 8e-6 / crowd.trainer_mbit)
    keys = [] if begun is None else [header.key for header in begun.headers if header.key in world.authority.headers]
    out = {key for node in world.members() for key in node.headers if key in keys}
    knew = 0 if begun is None else _knew_seal(world, begun)
    world.kill(world.authority)
    world.run(world.now + away_s)
    world.restart_authority(begun if moment == "sealing" else None)
    if begun is None or moment not in SEALED:
        world.run(world.now + LOAD_S)
    before = world.authority.socket_bytes
    last = begun if begun is not None and moment in SEALED else world.publish(**sizes, attempt=1)
    whole = world.run_until(lambda: world.all_hold(last.id), PATIENCE_S, 0.05)
    stale = {key.attempt for node in world.members() for key in node.headers if (key.epoch, key.version) == last.id}
    return {
        "moment": moment,
        "seed": seed,
        "nodes": crowd.nodes,
        "chunks": sizes["chunks"],
        "chunks_made": len(keys),
        "chunks_out": len(out),
        "knew_seal": knew,
        "all_hold": whole,
        "missing": sum(node.core.state.held != last.id for node in world.members()),
        "same_bits": len({node.root for node in world.members()}) == 1,
        "attempts_left": sorted(stale),
        "seconds": world.now - began,
        "second_attempt_copies": (world.authority.socket_bytes - before) / last.payload_bytes
        if moment not in SEALED
        else None,
    }


def wrong(row: dict[str, Any]) -> list[str]:
    """Return a sentence about each failed check of the row."""
    case = f"killed while {row['moment']}, seed {row['seed']}"
    if not row["all_hold"]:
        return [f"{row['missing']} of {row['nodes']} nodes did not hold the version after {PATIENCE_S} s ({case})"]
    return [] if row["same_bits"] else [f"nodes ended with different bits ({case})"]


def main(arguments: list[str] | None = None) -> int:
    options_parser = parser(__doc__)
    options_parser.add_argument("--nodes", type=int, default=32)
    options_parser.add_argument("--moment", choices=MOMENTS, action="append", help="only this moment (may be repeated)")
    options_parser.add_argument("--away-s", type=float, default=5.0, help="seconds until the restart (default 5)")
    options = options_parser.parse_args(arguments)
    crowd, payload = crowd_of(options, options.nodes), int(options.mib * 2**20)
    found = [
        restart(crowd, payload, seed, moment, options.away_s)
        for moment in options.moment or MOMENTS
        for seed in range(options.seed, options.seed + options.seeds)
    ]
    show("trainer_restart", found, as_json=options.json, columns=COLUMNS)
    return verdict("trainer_restart", [sentence for row in found for sentence in wrong(row)])


if __name__ == "__main__":
    sys.exit(main())
