"""`swarm-node publish FOLDER`, for trainers that only write checkpoints; and `publish --raw FILE`, for any file."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from codec.errors import UsageError
from codec.layout import Layout
from node.host.raw import raw_tensors
from node.trainers.api import Swarm, SwarmDown
from node.trainers.connection.seedlink import ask_state
from node.trainers.tensors.rounding import bring, can_bring
from swarm.transport.base import Unreachable

__all__ = ["Stamp", "folder_tensors", "publish_file", "publish_folder", "stamp"]

Stamp = tuple[tuple[str, int, int], ...]
"""What lies in a folder: (name, bytes, when it was written in ns) of each file, by name."""


def stamp(folder: Path) -> Stamp:
    """The files of `folder`, not of those below it (a file: itself). Raises `OSError`."""
    if folder.is_file():
        found = folder.stat()
        return ((folder.name, found.st_size, found.st_mtime_ns),)
    with os.scandir(folder) as entries:
        files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, found.st_size, found.st_mtime_ns) for name, found in files))


def publish_folder(
    home: Path, folder: Path, *, step: int = 0, everywhere: bool = False, as_it_was: Stamp | None = None
) -> dict[str, Any]:
    """Publish the checkpoint in `folder` through the seed of `home`; plain values about it. No torch is needed.

    Float32 tensors of a half-precision base are rounded, halves of a float32 base widened: as `Swarm.publish` does.
    `everywhere`: also wait until every live node holds it. `as_it_was`: its files when it was found whole; as they are
    now, if not given. Raises `Unreachable` without a seed, `UsageError` when the checkpoint is of another model or is
    written to while it is read (then nothing was sent), and what the trainer's API raises.
    """
    with _attached(home) as swarm:
        return _publish(swarm, folder_tensors(folder, swarm.layout, as_it_was), step, everywhere)


def folder_tensors(folder: Path, base: Layout, as_it_was: Stamp | None = None) -> Iterator[tuple[str, Bits]]:
    """(checkpoint name, bits) of every tensor in `folder`, for `Swarm.publish`; see `publish_folder`.

    Raises `UsageError`: at once when the checkpoint is of another model than `base`, at the end, when nothing has been
    sent yet, if it was written to meanwhile.
    """
    try:
        before = stamp(folder) if as_it_was is None else as_it_was
    except OSError:
        before = ()  # the next line says what is wrong with it
    checkpoint = Checkpoint.open(folder)
    _check_same_model(checkpoint, base)
    return _tensors(checkpoint, base, before)


def publish_file(home: Path, file: Path, *, step: int = 0, everywhere: bool = False) -> dict[str, Any]:
    """Publish any file through the seed of `home`, which must have been started for files (`--raw-mb`); see
    `node.host.raw`.

    Raises `Unreachable`, `UsageError`, and what the trainer's API raises.
    """
    with _attached(home) as swarm:
        return _publish(swarm, raw_tensors(file, swarm.layout), step, everywhere)


def _attached(home: Path) -> Swarm:
    try:
        ask_state(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error
    return Swarm.attach(home=home, start=False)


def _publish(swarm: Swarm, tensors: Iterator[tuple[str, Bits]], step: int, everywhere: bool) -> dict[str, Any]:
    publication = swarm.publish(tensors, step=step).wait(quorum=1.0 if everywhere else 0.0)
    assert publication.root is not None
    return {
        "epoch": publication.epoch,
        "version": publication.version,
        "root": publication.root.hex(),
        "changed": publication.changed,
        "density": publication.density,
        "delta_bytes": publication.bytes,
        "full_bytes": swarm.layout.full_bytes,
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
    if all(_fits(found.get(name), wanted.get(name)) for name in differing):
        return
    differing = {name for name in differing if not _fits(found.get(name), wanted.get(name))}
    name = min(differing)
    there, here = (_tensor(table.get(name)) for table in (found, wanted))
    raise UsageError(
        f"{checkpoint.path} is of another model than the seed's base: {name} is {there} in it, {here} in the base. "
        "Publish checkpoints of the model that the seed was started with."
    )


def _fits(found: tuple[str, tuple[int, ...]] | None, wanted: tuple[str, tuple[int, ...]] | None) -> bool:
    """Of another dtype that is brought to the base's, as `Swarm.publish` does with a model's."""
    return found is not None and wanted is not None and found[1] == wanted[1] and can_bring(found[0], wanted[0])


def _tensor(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "not" if spec is None else f"{spec[0]} {'x'.join(map(str, spec[1])) or 'scalar'}"


def _tensors(checkpoint: Checkpoint, base: Layout, before: Stamp) -> Iterator[tuple[str, Bits]]:
    """Every tensor; then, before anything of them has left, whether the files are still the same."""
    for name in checkpoint.names:
        spec = checkpoint.layout.tensor(name)
        yield name, bring(name, checkpoint.bits(name), spec.dtype, base.tensor(name).dtype).reshape(spec.shape)
    try:
        unchanged = stamp(checkpoint.path) == before
    except OSError:  # it is gone: all of it may have been read, or not
        unchanged = False
    if not unchanged:
        raise UsageError(f"{checkpoint.path} was written to while it was read; nothing was published.")
