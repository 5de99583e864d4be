"""The same small swarm twice: the product's processes on emulated links, and its cores on simulated ones.

Uplinks all alike, downlinks 1 Gbit/s, one region of 5 ms, no loss, bandwidths known, connections paced by bandwidth
(BBR) in both; the second version counts in both. What is compared is the time as a multiple of each one's own bound,
for the emulated links have larger packets than the simulated ones.
"""

from collections.abc import Sequence
from typing import Any, Final

from scenarios.crowd import Crowd, Step, gather, step
from scenarios.real import Node, distribute
from scenarios.rows import row_of

__all__ = ["compare"]

IDLE_S: Final = 20.0
ROUND_TRIP_MS: Final = 5.0
"""Within a region, as `scenarios.crowd` has it."""


def compare(nodes: int, mbit: float, payload_bytes: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row of the real swarm and one of the simulated; the latter's `agreement` is its time over the real one's.

    Raises `UsageError` where links cannot be emulated.
    """
    real = [_real(nodes, mbit, payload_bytes)]
    crowd = Crowd(
        nodes, trainer_mbit=mbit, median_mbit=mbit, sigma=0.0, error=0.0, regions=1, loss=0.0, congestion="bbr"
    )
    simulated: list[Step] = []
    for seed in seeds:
        world = gather(crowd, seed)
        step(world, payload_bytes)
        world.run(world.now + IDLE_S)
        simulated.append(step(world, payload_bytes))
    rows = [row_of("real", real), row_of("its twin", simulated)]
    rows[1]["agreement"] = rows[1]["ratio"] / rows[0]["ratio"]
    return rows


def _real(nodes: int, mbit: float, payload_bytes: int) -> Step:
    (went,) = distribute(Node(mbit), [Node(mbit)] * nodes, [payload_bytes], rtt_ms=ROUND_TRIP_MS)
    had = sorted(went.had_s.values())
    return Step(
        nodes=nodes, payload_bytes=went.payload_bytes, bound_s=went.bound_s, seconds=had[-1], first_s=had[0],
        median_s=had[len(had) // 2], trainer_bytes=went.sent_bytes, duplicates=went.duplicates, crossings=0.0,
        missing=0,
    )  # fmt: skip
