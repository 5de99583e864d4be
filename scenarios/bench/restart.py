"""Measures how long a node takes to start from a model on its disk, after a clean end and after a kill.

The replica is in memory or on disk. For comparison it measures reading and hashing the same bytes. All figures are also
given as CPU time: with a replica in memory most of it is the first use of each page of memory, then the decoding of the
versions since the checkpoint. `scenarios.bench.disk` measures whole processes.

    python -m scenarios.bench.restart --gb 4
    python -m scenarios.bench.restart --gb 1 --versions 7 --cold --json
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3

from codec import Key, Layout, Manifest, Packer, Replica, TensorSpec, chunk_target, open_header, seal_chunk, state_root
from codec.chunk import ChunkKey
from codec.staging import block_hash, encode
from scenarios.harness.command import json_parser
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.model import Model
from swarm.store import Store

__all__ = ["main", "measure"]

_TENSOR: Final = (16 << 10, 1 << 10)
_DENSITY: Final = 0.01


def measure(folder: Path, model_bytes: int, versions: int, *, cold: bool) -> dict[str, Any]:
    """Measure every combination of replica place and end. `versions`: versions since the checkpoint, the full copy of
    the model on disk. `cold`: drop the page cache first, so that files are read from the disk."""
    key = Key.generate()
    n_tensors = max(1, round(model_bytes / (2 * _TENSOR[0] * _TENSOR[1])))
    layout = Layout(tuple(TensorSpec(f"layer.{i:04}.weight", "BF16", _TENSOR) for i in range(n_tensors)))
    with Store(folder, key.public) as store:
        model = _create(store, layout, key, versions)
        root = model.replica.root if model.replica is not None else b""
        floors = _floors(store.checkpoints.list()[0].folder / "model.safetensors", cold=cold)
        rows = []
        for place in ("ram", "disk"):
            for end in ("clean", "kill"):
                if end == "clean":
                    model.close()
                del model
                if cold:
                    _drop_page_cache(folder)
                model = Model(store, on_disk=lambda *sizes, disk=place == "disk": disk)
                start_s, start_cpu_s = _cost(model.restore)
                assert model.replica is not None
                assert model.replica.root == root, "restore gave another model"
                audit_s, audit_cpu_s = _cost(partial(_audit, model))
                row = {"place": place, "after": end, "start_s": start_s, "audit_s": audit_s}
                rows.append(row | {"start_cpu_s": start_cpu_s, "audit_cpu_s": audit_cpu_s})
                assert model.version is not None, "the audit found damage"
    setup = {"scenario": "restart", "model_bytes": layout.nbytes, "versions": versions, "cold": cold}
    return setup | floors | {"rows": rows}


def _create(store: Store, layout: Layout, key: Key, versions: int) -> Model:
    """Store a swarm's version 0 and `versions` steps. The made-up weights are the same in every block."""
    rng = np.random.default_rng(0)
    words = (rng.normal(0, 0.02, layout.block(0).count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    replica = Replica.create(layout)
    for block in range(layout.n_blocks):
        replica.write_block(block, words.tobytes(), block_hash(words))
    model = Model(store)
    genesis(store, model, replica, key, files={})
    for number in range(1, versions + 1):
        new = words.copy()
        new[rng.random(new.size) < _DENSITY] += 1
        _step(store, model, key, number, words, new)
        words = new
    return model


def _step(store: Store, model: Model, key: Key, number: int, old: np.ndarray, new: np.ndarray) -> None:
    replica = model.replica
    assert isinstance(replica, Replica)
    layout, hashes, ids, payload_bytes = replica.layout, replica.hashes.copy(), [], 0
    delta = encode(0, old, new, layout.block(0).dtype)
    assert delta is not None
    packer = Packer(chunk_target(len(delta.payload) * layout.n_blocks))
    hashes[:] = np.frombuffer(delta.new_hash, np.uint8)

    def full() -> Iterator[list[Any]]:
        for block in range(layout.n_blocks):
            yield from packer.add(type(delta)(block, delta.coder, delta.new_hash, delta.payload))
        yield from packer.flush()

    for seq, deltas in enumerate(full()):
        chunk = seal_chunk(ChunkKey(0, number, 0, seq), replica.root, layout.hash, deltas, key)
        header = open_header(chunk.header, key.public)
        store.chunks.put_header(header, chunk.header)
        for index in range(header.n_pieces):
            piece = header.piece_range(index)
            store.chunks.put_piece(header.key, index, chunk.body[piece.start : piece.stop])
        ids.append(chunk.id)
        payload_bytes += chunk.nbytes
    root = state_root(layout.hash, hashes)
    manifest = Manifest(
        key.public, 0, number, 0, replica.root, root, layout.hash, tuple(ids), payload_bytes, layout.n_blocks
    )
    model.prepare(manifest, manifest.seal(key))
    model.apply(manifest)


def _audit(model: Model) -> None:
    while model.audit():
        pass


def _floors(path: Path, *, cold: bool) -> dict[str, float]:
    """Return the seconds that all cores take to read the same bytes into new memory, and to hash them."""
    size, part = path.stat().st_size, 8 << 20
    parts = range(0, size, part)
    fd = os.open(path, os.O_RDONLY)
    memory = np.empty(size, np.uint8)
    if cold:
        _drop_page_cache(path.parent)

    def read(at: int) -> None:
        os.preadv(fd, [memory[at : at + part].data], at)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        read_s, read_cpu_s = _cost(lambda: list(pool.map(read, parts)))
        hash_s, hash_cpu_s = _cost(
            lambda: list(pool.map(lambda at: blake3(memory[at : at + part].data).digest(), parts))
        )
    os.close(fd)
    return {"read_s": read_s, "read_cpu_s": read_cpu_s, "blake3_s": hash_s, "blake3_cpu_s": hash_cpu_s}


def _drop_page_cache(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _cost(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of all threads of this process."""
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu_began


def main(arguments: list[str] | None = None) -> int:
    parser = json_parser(__doc__)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the model (default 2)")
    parser.add_argument("--versions", type=int, default=4, help="versions since the checkpoint: 0 to 7 (default 4)")
    parser.add_argument("--folder", type=Path, help="where to put it, three times its size (default: a temporary one)")
    parser.add_argument("--cold", action="store_true", help="have every file read from the disk")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), round(options.gb * 1e9), options.versions, cold=options.cold)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"{found['model_bytes'] / 1e9:.2f} GB, {found['versions']} versions since the checkpoint")
    read, hashed = (f"{found[f'{what}_s']:.2f} s ({found[f'{what}_cpu_s']:.2f} CPU s)" for what in ("read", "blake3"))
    print(f"to read it into fresh memory {read}, to hash it {hashed}, on all cores")
    for row in found["rows"]:
        start, audit = (f"{row[f'{what}_s']:.2f} s ({row[f'{what}_cpu_s']:.2f} CPU s)" for what in ("start", "audit"))
        proof = f", proven {audit} later (unhurried: at 1 GB/s)" if row["audit_s"] > 1e-3 else ""
        print(f"{row['place']:>4} after a {row['after']:<5} end: {start}{proof}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
