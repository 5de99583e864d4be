"""The same small swarm twice: the product's processes on emulated links, and its cores on simulated ones.

Uplinks all alike, downlinks 1 Gbit/s, one region of 5 ms, no loss, bandwidths known, connections paced by bandwidth
(BBR) in both; the second version counts in both. What is compared is the time as a multiple of each one's own bound,
for the emulated links have larger packets than the simulated ones.

Real nodes share one machine's processors, so the twin's do too: as many cores, each kind of work as dear as it takes
for a version to cost what the real processes and their links spent on theirs. The first version says how much that is.
Nothing of the real run's times goes into it. A third row has a processor for each node, as boxes of their own would.
"""

import os
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Final

from scenarios.emulator.real import Node, Outcome, distribute
from scenarios.sim.crowd import Crowd, Step, gather, step
from scenarios.sim.rows import row_of
from scenarios.sim.virtual import Costs, Cpu

__all__ = ["compare"]

IDLE_S: Final = 20.0
ROUND_TRIP_MS: Final = 5.0
"""Within a region, as `scenarios.sim.crowd` has it."""


def compare(nodes: int, mbit: float, payload_bytes: int, seeds: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """A row of the real swarm, one of its twin, whose `agreement` is its time over the real one's, and one of the twin
    with a processor for each node.

    Raises `UsageError` where links cannot be emulated.
    """
    (real,) = distribute(Node(mbit), [Node(mbit)] * nodes, [payload_bytes], rtt_ms=ROUND_TRIP_MS)
    crowd = Crowd(
        nodes, trainer_mbit=mbit, median_mbit=mbit, sigma=0.0, error=0.0, regions=1, loss=0.0, congestion="bbr"
    )
    spent_s = sum(real.spent_s.values())
    went = row_of("real", [_as_step(nodes, real)])
    twin = row_of("its twin", [_twin(crowd, payload_bytes, seed, spent_s) for seed in seeds])
    apart = row_of("own cores", [_twin(crowd, payload_bytes, seed) for seed in seeds])
    return went, twin | {"agreement": twin["ratio"] / went["ratio"]}, apart


def _twin(crowd: Crowd, payload_bytes: int, seed: int, spent_s: float | None = None) -> Step:
    """The second version. `spent_s`: processor seconds for it, of as many cores as this machine has."""
    host = None if spent_s is None else Cpu(Costs(), os.cpu_count() or 1)
    world = gather(crowd, seed, host=host)
    before_s = host.busy_s if host else 0.0
    step(world, payload_bytes)
    if host and spent_s:
        dearer = spent_s / (host.busy_s - before_s)
        host.costs = Costs(*(dearer * cost for cost in astuple(host.costs)))
    world.run(world.now + IDLE_S)
    return step(world, payload_bytes)


def _as_step(nodes: int, went: Outcome) -> Step:
    had = sorted(went.had_s.values())
    return Step(
        nodes=nodes, payload_bytes=went.payload_bytes, bound_s=went.bound_s, seconds=had[-1], first_s=had[0],
        median_s=had[len(had) // 2], trainer_bytes=went.sent_bytes, duplicates=went.duplicates, crossings=0.0,
        missing=0,
    )  # fmt: skip
