"""A node's replica and a real engine process over it, for tests."""

import contextlib
import os
from pathlib import Path

import numpy as np
import trio
from seed_kit import random_replica

from codec import Chunk, ChunkKey, Key, Replica, StagedChunk, open_header, seal_chunk, write_patch
from node.engines.host import EngineDeadlines, EngineHost, EngineSpec, worker_command
from node.engines.replica_ref import ReplicaRef


class NodeReplica:
    """A replica that advances through made-up versions, and their patches for an engine."""

    def __init__(self, folder: Path) -> None:
        self.replica = random_replica()
        self.folder = folder
        self.version = (0, 0)
        (folder / "config.json").write_text("{}")

    @property
    def ref(self) -> ReplicaRef:
        fd = self.replica.seal_for_readers()
        return ReplicaRef(self.replica.layout, fd, self.folder, self.version, self.replica.root)

    async def source(self) -> ReplicaRef:
        return self.ref

    def step(self) -> tuple[int, tuple[int, int], bytes]:
        """Advance to the next version. Returns (patch descriptor, version, root)."""
        key, version = Key(b"k" * 32), (0, self.version[1] + 1)
        staged = stage_next(self.replica, key, version)
        fd, _ = write_patch([staged], self.replica.layout)
        self.replica.scatter([staged])
        self.version = version
        return fd, version, self.replica.root


def stage_next(replica: Replica, key: Key, version: tuple[int, int]) -> StagedChunk:
    deltas = []
    for block in range(replica.layout.n_blocks):
        new = replica.block(block).copy()
        new[version[1] % 3 :: 101] += np.ones((), new.dtype)
        if (delta := replica.encode_block(block, new)) is not None:
            deltas.append(delta)
    at = ChunkKey(*version, 0, 0)
    chunk: Chunk = seal_chunk(at, replica.root, replica.layout.hash, deltas, key)
    return replica.stage(open_header(chunk.header, key.public), chunk.body)


@contextlib.asynccontextmanager
async def engine(tmp_path: Path, node: NodeReplica, monkeypatch, source=None, **deadlines: float):
    """A host with a numpy engine attached."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}{os.pathsep}{here.parent.parent}")
    socket = tmp_path / "engine.sock"
    command = worker_command(socket, "numpy_engine:NumpyEngine")
    spec = EngineSpec(socket, command, tmp_path / "engine.log")
    host = EngineHost(spec, source or node.source, EngineDeadlines(**deadlines))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            await nursery.start(host.run)
            await host.wait_ready()
            yield host
            nursery.cancel_scope.cancel()
