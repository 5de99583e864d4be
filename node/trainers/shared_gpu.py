"""Lets a trainer use the GPU of a node's engines between two batches of rollouts."""

from pathlib import Path

from node.status.sleeping import NodeAway, sleep_engines, wake_engines
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["sleep", "wake"]


def sleep(node: Path, within_s: float) -> bool:
    """See `Swarm.sleep`."""
    try:
        return sleep_engines(node, within_s)
    except NodeAway as error:
        raise SwarmDown(str(error)) from error


def wake(node: Path, within_s: float) -> None:
    """See `Swarm.wake`."""
    try:
        ready = wake_engines(node, within_s)
    except NodeAway as error:
        raise SwarmDown(str(error)) from error
    if not ready:
        raise SwarmTimeout(
            f"The engines of {node} were started, and none was ready within {within_s:g} s: see its engine.log."
        )
