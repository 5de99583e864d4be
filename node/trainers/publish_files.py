"""Publishes checkpoint folders and raw files, for `swarm-node publish FOLDER` and `swarm-node publish --raw FILE`."""

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
"""The files of a folder, by name: (name, bytes, time of the last change in ns) of each."""


def stamp(folder: Path) -> Stamp:
    """The files directly in `folder`; of a file, the file itself. Raises `OSError`."""
    if folder.is_file():
        info = folder.stat()
        return ((folder.name, info.st_size, info.st_mtime_ns),)
    with os.scandir(folder) as entries:
        files = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    return tuple(sorted((name, info.st_size, info.st_mtime_ns) for name, info in files))


def publish_folder(
    home: Path, folder: Path, *, step: int = 0, everywhere: bool = False, as_it_was: Stamp | None = None
) -> dict[str, Any]:
    """Publish the checkpoint in `folder` through the seed of `home`, and return plain values about the version.

    Needs no torch. Float32 tensors of a half-precision base are rounded and half-precision tensors of a float32 base
    widened, as in `Swarm.publish`. `everywhere`: also wait until every live node holds the version. `as_it_was`: the
    files when the checkpoint was found complete; by default as they are now. Raises `Unreachable` without a seed,
    `UsageError` when the checkpoint is of another model or is written to while it is read (nothing was sent then), and
    what `Swarm.publish` and `Publication.wait` raise.
    """
    with _attached(home) as swarm:
        return _publish(swarm, folder_tensors(folder, swarm.layout, as_it_was), step, everywhere)


def folder_tensors(folder: Path, base: Layout, as_it_was: Stamp | None = None) -> Iterator[tuple[str, Bits]]:
    """(checkpoint name, bits) of every tensor in `folder`, for `Swarm.publish`; see `publish_folder`.

    Raises `UsageError` at once when the checkpoint is of another model than `base`, and after the last tensor, before
    anything was sent, when a file was written to meanwhile.
    """
    try:
        before = stamp(folder) if as_it_was is None else as_it_was
    except OSError:
        before = ()  # opening the checkpoint raises the error
    checkpoint = Checkpoint.open(folder)
    _check_same_model(checkpoint, base)
    return _tensors(checkpoint, base, before)


def publish_file(home: Path, file: Path, *, step: int = 0, everywhere: bool = False) -> dict[str, Any]:
    """Publish any file through the seed of `home`, which must have been started for files (`--raw-mb`).

    For the format see `node.host.raw`; for the values returned and the errors, `publish_folder`.
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
    """Raises `UsageError` when a checkpoint's tensors are not the base's, before a version is begun."""
    specs, base_specs = (
        {name: (spec.dtype, spec.shape) for spec in layout.tensors for name in (spec.name, *spec.aliases)}
        for layout in (checkpoint.layout, base)
    )
    tied = {name for spec in (*checkpoint.layout.tensors, *base.tensors) for name in spec.aliases}
    differing = {name for name in specs.keys() | base_specs.keys() if specs.get(name) != base_specs.get(name)} - tied
    differing = {name for name in differing if not _convertible(specs.get(name), base_specs.get(name))}
    if not differing:
        return
    name = min(differing)
    there, here = (_describe(table.get(name)) for table in (specs, base_specs))
    raise UsageError(
        f"{checkpoint.path} is of another model than the seed's base: {name} is {there} in it, {here} in the base. "
        "Publish checkpoints of the model that the seed was started with."
    )


def _convertible(found: tuple[str, tuple[int, ...]] | None, wanted: tuple[str, tuple[int, ...]] | None) -> bool:
    """Whether a tensor of this (dtype, shape) is converted to the base's, as `Swarm.publish` converts a model's."""
    return found is not None and wanted is not None and found[1] == wanted[1] and can_bring(found[0], wanted[0])


def _describe(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "not" if spec is None else f"{spec[0]} {'x'.join(map(str, spec[1])) or 'scalar'}"


def _tensors(checkpoint: Checkpoint, base: Layout, before: Stamp) -> Iterator[tuple[str, Bits]]:
    """Every tensor; then, before anything was sent, a check that the files have not changed."""
    for name in checkpoint.names:
        spec = checkpoint.layout.tensor(name)
        yield name, bring(name, checkpoint.bits(name), spec.dtype, base.tensor(name).dtype).reshape(spec.shape)
    try:
        unchanged = stamp(checkpoint.path) == before
    except OSError:  # the folder is gone, and perhaps not all of it was read
        unchanged = False
    if not unchanged:
        raise UsageError(f"{checkpoint.path} was written to while it was read; nothing was published.")
