"""The cost of publishing in the training loop, the time to the first chunk, and the speed-up of encoding with a second
rank."""

import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from codec import Layout, Replica, TensorSpec, write_checkpoint
from codec.chunk import CODER_RICE, MIN_PIECE_BYTES
from codec.layout import BLOCK_ELEMENTS
from node.trainers.connection.seedlink import ask_state
from node.trainers.publish.encoding import Encoder
from node.trainers.ranks.copies import Copies
from node.trainers.ranks.ownership import Ownership, TensorPart
from scenarios.harness.swarm import swarm_on

__all__ = ["cost", "scaling"]

COLUMNS = 1 << 11
DENSITY = 0.01
CONFIG = b'{"model_type": "none"}'


def layout_of(tensors: int, blocks: int) -> Layout:
    """Return a layout of `tensors` bf16 matrices with `blocks` blocks each."""
    shape = (blocks * BLOCK_ELEMENTS // COLUMNS, COLUMNS)
    return Layout(tuple(TensorSpec(f"layer.{i:03}.weight", "BF16", shape) for i in range(tensors)))


def words_of(layout: Layout, number: int) -> np.ndarray:
    """Return one tensor of bf16 bits of values near 0.02: one random block, repeated."""
    elements = layout.tensors[0].elements
    values = np.random.default_rng(number).standard_normal(BLOCK_ELEMENTS, np.float32) * np.float32(0.02)
    words = (values.view(np.uint32) >> 16).astype(np.uint16)
    return np.resize(words, elements)


def move(words: np.ndarray, seed: int) -> None:
    """Change the lowest bit of a random share `DENSITY` of the elements, in place: the changes of one step."""
    rng = np.random.default_rng(seed)
    words[rng.integers(0, words.size, int(DENSITY * words.size))] ^= 1


def cost(tensors: int, blocks: int, steps: int) -> dict[str, Any]:
    """Time `publish` and one copy of the same bf16 weights in torch, with a real seed and a real node."""
    import torch

    from node import Swarm

    layout = layout_of(tensors, blocks)
    weights = {spec.name: words_of(layout, i).reshape(spec.shape) for i, spec in enumerate(layout.tensors)}
    model = {name: torch.from_numpy(words).view(torch.bfloat16) for name, words in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        write_checkpoint(base, layout, lambda name: weights[name].reshape(-1), {"config.json": CONFIG})
        with swarm_on(Path(folder), base, nodes=1) as swarm, Swarm.attach(model, home=swarm.home()) as trainer:
            into = {name: torch.full_like(tensor, 1.0) for name, tensor in model.items()}
            rows = []
            for step in range(1, steps + 1):
                for i, words in enumerate(weights.values()):
                    move(words.reshape(-1), 1000 * step + i)
                started = time.perf_counter()
                for name, tensor in model.items():
                    into[name].copy_(tensor)
                copied = time.perf_counter()
                watch = _FirstChunk(swarm.home(), layout.n_blocks) if step % 2 == 0 else None  # polling takes time
                began = time.perf_counter()
                publication = trainer.publish(model, step=step)
                taken = time.perf_counter() - began
                publication.wait(quorum=1.0, timeout_s=60)
                rows.append({"copy_s": copied - started, "publish_s": taken, "bytes": publication.bytes})
                rows[-1] |= {"first_chunk": watch and watch.stop(), "seconds": dict(publication.seconds)}
    plain = [row for row in rows if row["first_chunk"] is None]
    return {
        "model_bytes": layout.full_bytes,
        "copy_s": statistics.median(row["copy_s"] for row in plain),
        "publish_s": statistics.median(row["publish_s"] for row in plain),
        "publish_over_copy": statistics.median(row["publish_s"] / row["copy_s"] for row in plain),
        "first_chunk_at": statistics.median(row["first_chunk"] for row in rows if row["first_chunk"] is not None),
        "steps": rows,
    }


class _FirstChunk:
    """Measures which share of the blocks the trainer had encoded when the seed had sent its first piece.

    A piece counts as sent when the seed's sockets have sent more bytes than its heartbeats need."""

    def __init__(self, home: Path, blocks: int) -> None:
        self._home, self._blocks = home, blocks
        self._before = self._sent()
        self._diffed = 0
        self._seen = 1.0
        self._over = threading.Event()
        self._plain = Replica.encode_changes
        counter = self

        def counted(replica: Replica, *arguments: Any) -> Any:
            found = counter._plain(replica, *arguments)
            counter._diffed += 1
            return found

        Replica.encode_changes = counted  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _sent(self) -> int:
        return ask_state(self._home).swarm.sent_bytes

    def _look(self) -> None:
        while not self._over.wait(0.002):
            diffed = self._diffed
            if self._sent() - self._before > MIN_PIECE_BYTES:
                self._seen = diffed / self._blocks
                return

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        Replica.encode_changes = self._plain  # type: ignore[method-assign]
        return self._seen


# ------------------------------------------------------------ two ranks


def scaling(tensors: int, blocks: int, tries: int) -> dict[str, Any]:
    """Time the extraction and encoding of one version by one process, and by two that share it; one thread each."""
    layout = layout_of(tensors, blocks)
    replica, copies = Replica.create(layout), Copies.create(layout, 2)
    for i, spec in enumerate(layout.tensors):
        words = words_of(layout, i)
        for number, block in enumerate(layout.blocks_of(spec.name)):
            replica._writable(block)[:] = words[number * BLOCK_ELEMENTS : (number + 1) * BLOCK_ELEMENTS]
        move(words, i)
        copies.tensor(0, spec)[:] = words.view(np.uint8)
    for rank in range(2):
        copies.note_written(0, rank, 1, np.arange(len(layout.tensors)))
    Encoder(copies, Ownership.alone(layout), 0, 1, layout).await_ready()  # compiles the kernels before the measurement
    replica.encode_block(0, copies.block(0, 0))
    times: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(tries):
        for world in (1, 2):
            times[world].append(_encode(layout, replica, copies, world))
    one, two = min(times[1]), min(times[2])
    return {"one_s": one, "two_s": two, "speedup": one / two, "gb_s": layout.full_bytes / one / 1e9}


def _encode(layout: Layout, replica: Replica, copies: Copies, world: int) -> float:
    """Return the seconds from when all ranks are ready until the last has encoded its share."""
    rows = layout.tensors[0].shape[0]
    cut = [
        TensorPart(0, rank * rows // world, (rank + 1) * rows // world - rank * rows // world) for rank in range(world)
    ]
    shares = Ownership(layout, [{spec.name: part for spec in layout.tensors} for part in cut])
    context = multiprocessing.get_context("fork")
    start = context.Barrier(world)
    ended: Any = context.SimpleQueue()

    def run(rank: int) -> None:
        encoder = Encoder(copies, shares, rank, 1, layout)
        replica.encode_block(int(encoder.blocks[0]), copies.block(0, int(encoder.blocks[0])))
        start.wait()
        began = time.perf_counter()
        for _ in encoder.deltas(replica, 0, 1, CODER_RICE):
            pass
        ended.put((began, time.perf_counter()))
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(world)]
    for process in processes:
        process.start()
    spans = [ended.get() for _ in processes]
    for process in processes:
        process.join()
    return max(end for _, end in spans) - min(began for began, _ in spans)
