"""`swarm-node publish FOLDER`: for trainers that only write checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from node.trainers.api import Swarm, SwarmDown
from node.trainers.seedlink import ask_state
from swarm.transport.base import Unreachable

__all__ = ["publish_folder"]


def publish_folder(home: Path, folder: Path, *, step: int = 0, everywhere: bool = False) -> dict[str, Any]:
    """Publish the checkpoint in `folder` through the seed of `home`; plain values about it. No torch is needed.

    `everywhere`: also wait until every live node holds it. Raises `Unreachable` without a seed, `UsageError` when the
    checkpoint is of another model, and what the trainer's API raises.
    """
    checkpoint = Checkpoint.open(folder)
    try:
        ask_state(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error
    with Swarm.attach(home=home, start=False) as swarm:
        publication = swarm.publish(_tensors(checkpoint), step=step).wait(quorum=1.0 if everywhere else 0.0)
    assert publication.root is not None
    return {
        "epoch": publication.epoch,
        "version": publication.version,
        "root": publication.root.hex(),
        "changed": publication.changed,
        "density": publication.density,
        "delta_bytes": publication.bytes,
        "full_bytes": checkpoint.layout.full_bytes,
        "seconds": publication.seconds,
    }


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Bits]]:
    for name in checkpoint.names:
        yield name, checkpoint.bits(name).reshape(checkpoint.layout.tensor(name).shape)
