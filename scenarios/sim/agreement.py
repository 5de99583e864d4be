"""Runs a small swarm as real processes on emulated links and as cores on simulated links (its twin), and compares them.

Both have equal uplinks, downlinks of 1 Gbit/s, one region with a round trip of 5 ms, no loss, bandwidths that are known
exactly, and BBR congestion control. In both, the second version is measured. Times are compared as multiples of each
run's own bound, because packets are larger on the emulated links than on the simulated ones.

The real nodes share the processors of one machine, so the twin's nodes share a processor with the same number of cores.
The twin's first version measures the processor time that it charges; its costs are then scaled by one factor, so that a
version costs as much processor time as the real processes and their links spent. No duration of the real run is used. A
third row gives each node a processor of its own, as on separate machines.
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
"""Round trip within a region, the same as in `scenarios.sim.crowd`."""


def compare(nodes: int, mbit: float, payload_bytes: int, seeds: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """Return three rows: the real swarm, its twin, and the twin with a processor for each node.

    The twin's `agreement` is its ratio to the bound divided by that of the real swarm.

    Raises `UsageError` if links cannot be emulated on this machine.
    """
    (real,) = distribute(Node(mbit), [Node(mbit)] * nodes, [payload_bytes], rtt_ms=ROUND_TRIP_MS)
    crowd = Crowd(
        nodes, trainer_mbit=mbit, median_mbit=mbit, sigma=0.0, error=0.0, regions=1, loss=0.0, congestion="bbr"
    )
    spent_s = sum(real.spent_s.values())
    real_row = row_of("real", [_as_step(nodes, real)])
    twin = row_of("its twin", [_twin(crowd, payload_bytes, seed, spent_s) for seed in seeds])
    apart = row_of("own cores", [_twin(crowd, payload_bytes, seed) for seed in seeds])
    return real_row, twin | {"agreement": twin["ratio"] / real_row["ratio"]}, apart


def _twin(crowd: Crowd, payload_bytes: int, seed: int, spent_s: float | None = None) -> Step:
    """Simulate two versions and return the second.

    `spent_s` is the processor time that a version is to cost, on as many cores as this machine has. With None, each
    node has its own processor at the default costs.
    """
    host = None if spent_s is None else Cpu(Costs(), os.cpu_count() or 1)
    world = gather(crowd, seed, host=host)
    before_s = host.busy_s if host else 0.0
    step(world, payload_bytes)
    if host and spent_s:
        factor = spent_s / (host.busy_s - before_s)
        host.costs = Costs(*(factor * cost for cost in astuple(host.costs)))
    world.run(world.now + IDLE_S)
    return step(world, payload_bytes)


def _as_step(nodes: int, outcome: Outcome) -> Step:
    held_at_s = sorted(outcome.had_s.values())
    return Step(
        nodes=nodes, payload_bytes=outcome.payload_bytes, bound_s=outcome.bound_s, seconds=held_at_s[-1],
        first_s=held_at_s[0], median_s=held_at_s[len(held_at_s) // 2], trainer_bytes=outcome.sent_bytes,
        duplicates=outcome.duplicates, crossings=0.0, missing=0,
    )  # fmt: skip
