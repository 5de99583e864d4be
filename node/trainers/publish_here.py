"""Publishes checkpoint folders and raw files from this process, for a seed that does not read them itself.

It attaches as a trainer does, and compares the files with the seed's replica block by block as it reads them; nothing
is copied.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from codec.bits import Bits
from codec.checkpoint import Checkpoint
from codec.errors import SwarmError, UsageError
from codec.layout import Layout
from codec.parts import draft_layout, policy_base
from node.host.stamp import Stamp, stamp
from node.trainers.attach import attach, default_threads
from node.trainers.connection.seedlink import ask_state
from node.trainers.errors import SwarmDown
from node.trainers.file_messages import PUBLISHED_WITHIN_S
from node.trainers.publish.line import PublishLine
from node.trainers.standing import holders
from node.trainers.tensors.drafted import NO_DRAFT
from node.trainers.tensors.file_blocks import CheckpointBlocks, DraftedBlocks, RawBlocks
from node.trainers.tensors.rounding import bring, can_bring
from swarm.transport.base import Unreachable

__all__ = ["folder_blocks", "folder_tensors", "publish_file_here", "publish_folder_here"]

CLOSED_WITHIN_S: Final = 60.0
"""For a version that is still on its way when an error ended the wait: as `Swarm.close`."""


def publish_folder_here(
    home: Path,
    folder: Path,
    *,
    step: int = 0,
    everywhere: bool = False,
    as_it_was: Stamp | None = None,
    draft: Path | None = None,
) -> dict[str, Any]:
    """As `node.trainers.publish_files.publish_folder`, without asking the seed to read the files. `draft`: the folder
    of the draft model's new weights; None: it stays as it is."""

    def blocks(layout: Layout) -> CheckpointBlocks | DraftedBlocks:
        base = folder_blocks(folder, policy_base(layout), as_it_was)
        return base if draft is None else DraftedBlocks(base, _draft_blocks(draft, layout), layout)

    return _publish(home, blocks, step, everywhere, keep_draft=draft is None)


def _draft_blocks(folder: Path, layout: Layout) -> CheckpointBlocks:
    """The draft model's bits. `layout`: of the base with its draft.

    Raises `UsageError` when the swarm has none, and when the folder has another."""
    own = draft_layout(layout)
    if own is None:
        raise UsageError(NO_DRAFT)
    before, checkpoint = _stamped(folder, None)
    _check_same_model(checkpoint, own, "draft model")
    return CheckpointBlocks(checkpoint, own, before)


def publish_file_here(home: Path, file: Path, *, step: int = 0, everywhere: bool = False) -> dict[str, Any]:
    """As `node.trainers.publish_files.publish_file`, without asking the seed to read the file."""
    return _publish(home, lambda layout: RawBlocks(file, layout), step, everywhere, keep_draft=True)


def folder_blocks(folder: Path, base: Layout, as_it_was: Stamp | None) -> CheckpointBlocks:
    """The checkpoint's bits, in the layout of the seed's replica. Raises `UsageError` when it is of another model."""
    before, checkpoint = _open(folder, base, as_it_was)
    return CheckpointBlocks(checkpoint, base, before)


def folder_tensors(folder: Path, base: Layout, as_it_was: Stamp | None = None) -> Iterator[tuple[str, Bits]]:
    """(checkpoint name, bits) of every tensor in `folder`, for `Swarm.publish`; see
    `node.trainers.publish_files.publish_folder`.

    Raises `UsageError` at once when the checkpoint is of another model than `base`, and after the last tensor, before
    anything was sent, when a file was written to meanwhile.
    """
    before, checkpoint = _open(folder, base, as_it_was)
    return _tensors(checkpoint, base, before)


def _open(folder: Path, base: Layout, as_it_was: Stamp | None) -> tuple[Stamp, Checkpoint]:
    """The files as they are to be read, and the checkpoint. Raises `UsageError`."""
    before, checkpoint = _stamped(folder, as_it_was)
    _check_same_model(checkpoint, base)
    return before, checkpoint


def _stamped(folder: Path, as_it_was: Stamp | None) -> tuple[Stamp, Checkpoint]:
    try:
        before = stamp(folder) if as_it_was is None else as_it_was
    except OSError:
        before = ()  # opening the checkpoint raises the error
    return before, Checkpoint.open(folder)


def _publish(
    home: Path,
    source: Callable[[Layout], CheckpointBlocks | DraftedBlocks | RawBlocks],
    step: int,
    everywhere: bool,
    *,
    keep_draft: bool,
) -> dict[str, Any]:
    """`source(layout)`: the new bits, in the layout of the seed's replica. `keep_draft`: without the draft model's."""
    try:
        ask_state(home)
    except SwarmDown as error:
        raise Unreachable(str(error)) from error
    line = PublishLine(attach(None, home, None), default_threads(1), partial(holders, home), in_place=True)
    blocks: CheckpointBlocks | DraftedBlocks | RawBlocks | None = None
    try:
        blocks = source(line.layout)
        blocks.check_unchanged()
        publication = line.publish_blocks(
            blocks, step, PUBLISHED_WITHIN_S, expected_bytes=blocks.nbytes, keep_draft=keep_draft
        )
        publication.wait(1.0 if everywhere else 0.0, PUBLISHED_WITHIN_S)
    finally:
        with suppress(SwarmError):  # the publication has raised it
            line.close(CLOSED_WITHIN_S)
        if blocks is not None:
            blocks.close()
    assert publication.root is not None
    return {
        "epoch": publication.epoch,
        "version": publication.version,
        "root": publication.root.hex(),
        "changed": publication.changed,
        "density": publication.density,
        "delta_bytes": publication.bytes,
        "full_bytes": line.layout.full_bytes,
        "seconds": publication.seconds,
    }


def _check_same_model(checkpoint: Checkpoint, base: Layout, whose: str = "base") -> None:
    """Raises `UsageError` when a checkpoint's tensors are not those of the swarm's model, before a version is begun.
    `whose`: that model, in words."""
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
        f"{checkpoint.path} is of another model than the seed's {whose}: {name} is {there} in it, {here} in the "
        f"{whose}. "
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
