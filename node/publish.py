"""`swarm-node publish FOLDER`: for trainers that only write checkpoints."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from codec.layout import Layout
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
        _check_same_model(checkpoint, swarm.layout)
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


def _check_same_model(checkpoint: Checkpoint, base: Layout) -> None:
    """Before a version is opened: nothing of another model is ever sent."""
    found, wanted = (
        {name: (spec.dtype, spec.shape) for spec in layout.tensors for name in (spec.name, *spec.aliases)}
        for layout in (checkpoint.layout, base)
    )
    tied = {name for spec in (*checkpoint.layout.tensors, *base.tensors) for name in spec.aliases}
    differing = {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)} - tied
    if not differing:
        return
    name = min(differing)
    there, here = (_tensor(table.get(name)) for table in (found, wanted))
    raise UsageError(
        f"{checkpoint.path} is of another model than the seed's base: {name} is {there} in it, {here} in the base. "
        "Publish checkpoints of the model that the seed was started with."
    )


def _tensor(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "not" if spec is None else f"{spec[0]} {'x'.join(map(str, spec[1])) or 'scalar'}"


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Bits]]:
    for name in checkpoint.names:
        yield name, checkpoint.bits(name).reshape(checkpoint.layout.tensor(name).shape)
