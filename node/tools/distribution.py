"""What it takes to bring a version to N nodes: seconds and dollars of a star of full copies, a star of deltas, a swarm.

Pure arithmetic, shared by `swarm-node delta` for two checkpoints and for shapes alone.
"""

from dataclasses import dataclass
from typing import Final

__all__ = ["GB", "Dollars", "EgressPrices", "Seconds", "dollars_of", "seconds_of", "swarm_seconds"]

GB: Final = 1e9
"""Bytes in the GB of a price. Some providers bill GiB, which is 7 % more bytes for the same money."""


@dataclass(frozen=True, slots=True)
class EgressPrices:
    """Dollars a GB. `trainer_usd_gb`, `node_usd_gb`: what the trainer and each node pay for what they send.
    `ingress_usd_gb`: what each node pays for what it receives."""

    trainer_usd_gb: float
    node_usd_gb: float
    ingress_usd_gb: float = 0.0


@dataclass(frozen=True, slots=True)
class Seconds:
    """Until all nodes have the version, at best: no loss, no round trips, every uplink busy all the time."""

    star_full: float
    star_delta: float
    swarm: float


@dataclass(frozen=True, slots=True)
class Dollars:
    """For the traffic of one version, of the trainer and all nodes together."""

    star_full: float
    star_delta: float
    swarm: float


def swarm_seconds(nbytes: float, nodes: int, trainer_bytes_s: float, node_bytes_s: float) -> float:
    """All uplinks work at once: the trainer's must carry the bytes once, and all together N copies of them."""
    return max(nbytes / trainer_bytes_s, nodes * nbytes / (trainer_bytes_s + nodes * node_bytes_s))


def seconds_of(full_bytes: int, delta_bytes: int, nodes: int, up_mbit: float) -> Seconds:
    """`up_mbit`: the uplink of the trainer and of each node in Mbit/s."""
    up = up_mbit * 1e6 / 8
    return Seconds(nodes * full_bytes / up, nodes * delta_bytes / up, swarm_seconds(delta_bytes, nodes, up, up))


def dollars_of(full_bytes: int, delta_bytes: int, nodes: int, prices: EgressPrices) -> Dollars:
    """In a star the trainer sends all N copies. In a swarm it sends one, and the nodes send N - 1 among themselves."""
    received = nodes * prices.ingress_usd_gb
    star_gb = nodes * prices.trainer_usd_gb + received
    swarm_gb = prices.trainer_usd_gb + (nodes - 1) * prices.node_usd_gb + received
    return Dollars(full_bytes / GB * star_gb, delta_bytes / GB * star_gb, delta_bytes / GB * swarm_gb)
