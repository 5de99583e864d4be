"""The bits of the user's own model folder, and a reference to it where they need not be copied to the store."""

import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from codec import Checkpoint, Layered, Layout, Replica
from codec.block_files import BlockFiles
from codec.errors import PeerError, UsageError
from codec.layered import Payload
from codec.staging import block_hash
from swarm.store import Reference

__all__ = ["BaseFolder", "Proven"]


class Proven(NamedTuple):
    """A folder whose blocks were hashed: together they have `root`, and `reference` was taken before."""

    root: bytes
    reference: Reference


class BaseFolder:
    """The user's folder, or none (`path` None). `refer`: it may serve as a checkpoint, without being copied."""

    def __init__(self, path: Path | None, *, refer: bool) -> None:
        self.path = path
        self._refer = refer
        self.proven: Proven | None = None
        """Set when all bits of a replica came from the folder, and its files did not change meanwhile. Never set when
        the store needs its own copy: tensors are missing or have other names, or the files are no regular ones."""

    def load_replica(self, checkpoint: Checkpoint, layout: Layout, held: NDArray[np.bool_] | None = None) -> Replica:
        """A replica in memory with the checkpoint's bits, copied and hashed on all cores. A tensor that it does not
        have with the same shape and dtype has no bits. `held`: the blocks to copy; None: all. Raises `UsageError` when
        the checkpoint is of another model."""
        reference, replica = Reference.of(checkpoint.path, checkpoint.weight_files), Replica.create(layout, held=held)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            replica.load(checkpoint, pool.map)
        self._note(checkpoint, replica, reference)
        return replica

    def load(
        self, layout: Layout, payload: Payload, *, on_disk: bool, held: NDArray[np.bool_] | None = None
    ) -> Replica | Layered:
        """A replica with the folder's bits, or without bits. On disk the bits are hashed where they are, and nothing is
        copied. Raises `UsageError` as `load_replica`, and when the folder cannot be read."""
        if self.path is None:
            return Layered(layout, payload) if on_disk else Replica.create(layout, held=held)
        checkpoint = Checkpoint.open(self.path, parts=True)
        if not on_disk:
            return self.load_replica(checkpoint, layout, held)
        reference, layered = Reference.of(checkpoint.path, checkpoint.weight_files), Layered(layout, payload)
        try:
            files = BlockFiles.matching(layout, checkpoint)
            if layout.tensors and not files.names:
                raise UsageError(
                    f"{self.path} is another model: it has no tensor of this one. Give the folder of the base model."
                )

            def prove(block: int) -> None:
                spec = layout.block(block)
                bits = np.empty(spec.count, spec.dtype.bits)
                files.read(spec, bits)
                layered.place_block(block, files, block_hash(bits))

            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                for _ in pool.map(prove, [block for name in sorted(files.names) for block in layout.blocks_of(name)]):
                    pass
        except OSError as error:
            raise UsageError(f"Cannot read {self.path}: {error.strerror or error}.") from error
        self._note(checkpoint, layered, reference)
        return layered

    def _note(self, checkpoint: Checkpoint, replica: Replica | Layered, reference: Reference | None) -> None:
        self.proven = None
        with contextlib.suppress(KeyError, PeerError, OSError):
            BlockFiles.whole(replica.layout, checkpoint)
            if self._refer and reference is not None and reference.unchanged:
                self.proven = Proven(replica.root, reference)
