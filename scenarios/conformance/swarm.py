"""A trainer, a seed's replica, a node's replica and its engine, in one process and without sockets.

All classes are the product's: they copy the trainer's weights, encode blocks and seal them into chunks, stage and
scatter them at the node, and give the weight patch to its engine. Only the transport between them is left out.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codec import (
    Checkpoint,
    ChunkKey,
    Key,
    Layout,
    Packer,
    Replica,
    StagedChunk,
    chunk_target,
    open_header,
    read_patch,
    seal_chunk,
    state_root,
    write_patch,
)
from codec.chunk import CODER_RICE
from node.engines.transformers import TransformersEngine
from node.trainers.publish.encoding import Encoder
from node.trainers.ranks.copies import SLOTS, Copies
from node.trainers.ranks.ownership import Ownership
from node.trainers.tensors.weights import Copier, check_names

__all__ = ["LocalSwarm"]


class LocalSwarm:
    """A swarm of one trainer and one node. `node`: the node's replica; `engines`: the engines that it updates."""

    def __init__(self, base: Path, model: Any) -> None:
        """Attach the trainer's model. Raises `UsageError` when it does not match the base checkpoint."""
        self.checkpoint = Checkpoint.open(base)
        self.layout: Layout = self.checkpoint.layout
        check_names(self.layout, model)
        self.seed, self.node = Replica.from_checkpoint(self.checkpoint), Replica.from_checkpoint(self.checkpoint)
        self.copies, self.shares = Copies.create(self.layout, 1), Ownership.alone(self.layout)
        self._copier = Copier(self.layout, self.copies, self.shares, 0, self.seed.bits)
        self._encoder = Encoder(self.copies, self.shares, 0, 1, self.layout)
        self._key = Key(b"k" * 32)
        self.engines: list[TransformersEngine] = []
        self.followers: list[Callable[[int, int], None]] = []
        """Each is called with a patch's descriptor and its version after the node's replica has applied it."""
        self.version = 0

    def join(self, folder: Path, arithmetic: Any = "float32") -> TransformersEngine:
        """Return an engine that gets its weights from the node alone. `folder` receives the checkpoint's small files.

        Raises `UsageError`.
        """
        folder.mkdir(exist_ok=True)
        for name, data in self.checkpoint.files.items():
            (folder / name).write_bytes(data)
        engine = TransformersEngine(device="cpu", arithmetic=arithmetic)
        engine.load(folder, weights=False)
        engine.attach(self.layout)
        engine.reload(self.node.bits, (0, self.version), self.node.root)
        self.engines.append(engine)
        return engine

    def publish(self, model: Any) -> int:
        """Publish the next version to all replicas and engines; return the number of changed elements.

        Raises `UsageError`.
        """
        slot, number = self.version % SLOTS, self.version + 1
        self._copier.fill(slot, number, model)
        found = list(self._encoder.deltas(self.seed, slot, number, CODER_RICE))
        staged = self._deliver([block.encoded.delta for block in found], number)
        root = self.node.predicted_root(staged)
        fd, _ = write_patch(staged, self.layout)
        try:
            for engine in self.engines:
                engine.stage(read_patch(fd))
                engine.commit((0, number), root)
            self.node.scatter(staged)
            self.seed.scatter(staged)
            self.version = number
            for follow in self.followers:
                follow(fd, number)
        finally:
            os.close(fd)
        return sum(block.encoded.changed for block in found)

    def wrong(self, engine: TransformersEngine) -> list[str]:
        """Return the tensors whose live bits in the engine do not have the node's hashes."""
        hashes = engine.live_hashes(self.layout)
        blocks = np.flatnonzero((hashes != self.node.hashes).any(1))
        return sorted({self.layout.block(int(block)).name for block in blocks})

    def root(self) -> bytes:
        """Return the node's root, computed from its bits."""
        self.node.rehash()
        return state_root(self.layout.hash, self.node.hashes)

    def close(self) -> None:
        self._encoder.close()

    def _deliver(self, deltas: Sequence[Any], number: int) -> list[StagedChunk]:
        packer, staged = Packer(chunk_target(0)), list[StagedChunk]()
        full = [part for delta in deltas for part in packer.add(delta)] + list(packer.flush())
        for i, part in enumerate(full):
            key = ChunkKey(0, number, 0, i)
            chunk = seal_chunk(key, self.seed.root, self.layout.hash, part, self._key)
            header = open_header(chunk.header, self._key.public)
            staged.append(self.node.stage(header, chunk.body))
        return staged
