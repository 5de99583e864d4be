"""Measures the host memory of nodes with a format against that of a bf16 node: real processes, without engines.

    python -m scenarios.bench.format_memory [--mb 1000] [--format int4-group-e8] [--embeddings 0.03]

A seed carries a made-up model of `--mb` bytes in bf16, of which a share (`--embeddings`) is an embedding: bf16 in fp8
and int8 formats, int8 in int4 formats. A bf16 node and a node with the format join and follow two versions. Then the
memory of each process is read: shared memory, which holds the replica, and anonymous memory. The ratio `process` is of
both together. The same ratios of known models are reckoned from their shapes (`node.settings.memory_plan`).
"""

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from codec import Checkpoint, Layout, TensorSpec, write_checkpoint
from codec.bits import Bits
from codec.formats.spec import FORMATS, format_ratio
from node.settings import memory_plan
from node.tools.made_up import made_up_step
from node.tools.shapes import shapes_of
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.swarm import Swarm, swarm_in

__all__ = ["main", "measure", "reckon"]

_ROWS, _COLUMNS = 2048, 2048
_KNOWN = ("qwen3-8b", "llama-3-70b")


def _layout(model_bytes: int, embeddings: float) -> Layout:
    """Square matrices, and an embedding with a share of all bytes."""
    count = max(1, round(model_bytes * (1 - embeddings) / (2 * _ROWS * _COLUMNS)))
    tokens = max(1, round(model_bytes * embeddings / (2 * _COLUMNS)))
    matrices = (TensorSpec(f"layers.{i:04}.proj.weight", "BF16", (_ROWS, _COLUMNS)) for i in range(count))
    return Layout((TensorSpec("embed_tokens.weight", "BF16", (tokens, _COLUMNS)), *matrices))


def _write(folder: Path, layout: Layout, version: int) -> Path:
    """A version: matrices of the same random numbers, whose step differs by version."""

    def bits(name: str) -> Iterator[Bits]:
        spec = layout.tensor(name)
        rng = np.random.default_rng(crc32(name.encode()))
        for start in range(0, spec.shape[0], _ROWS):
            rows = min(_ROWS, spec.shape[0] - start)
            old, _ = made_up_step(rows, _COLUMNS, 1e-6, rng)
            changed = old.copy()
            changed[version :: 100 + version] ^= 1 if version else 0
            yield changed

    write_checkpoint(folder, layout, bits, {})
    return folder


def _memory(pid: int) -> dict[str, int]:
    """Bytes of a process: `anonymous`, and `shared`, which has the memory in which its replica is."""
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if words and words[0].startswith("Rss")}
    return {"anonymous": found["RssAnon"], "shared": found["RssShmem"]}


def measure(folder: Path, model_mb: float, name: str, embeddings: float) -> dict[str, Any]:
    """The memory of both nodes after two versions, and the ratios."""
    layout = _layout(round(model_mb * 1e6), embeddings)
    base = _write(folder / "step_0", layout, 0)
    rows: dict[str, dict[str, int]] = {}
    with swarm_in(folder / "swarm") as swarm:
        swarm.seed(base, "--format", name)
        ticket = swarm.ticket("--nodes", "2")
        swarm.node("bf16", ticket)
        swarm.node("format", ticket, "--format", name)
        for version in (1, 2):
            swarm.publish(_write(folder / f"step_{version}", layout, version), "--wait")
            _await(swarm, version)
        for node in ("bf16", "format"):
            rows[node] = _memory(swarm.pid(node))
    total = {node: sum(row.values()) for node, row in rows.items()}
    return {
        "format": name,
        "model_bytes": Checkpoint.open(base).layout.full_bytes,
        "reckoned": format_ratio(layout, FORMATS[name]),
        "replica": rows["format"]["shared"] / rows["bf16"]["shared"],
        "process": total["format"] / total["bf16"],
        "nodes": rows,
    }


def reckon(shapes: str, name: str) -> dict[str, Any]:
    """What a node with the format needs of a known model, as shares of a bf16 node's: the replica, and the plan of the
    whole process without an engine."""
    layout = shapes_of(shapes).layout
    held = round(layout.base_nbytes * format_ratio(layout, FORMATS[name]))
    process, bf16 = (memory_plan.node(nbytes, on_disk=False).nbytes for nbytes in (held, layout.base_nbytes))
    return {"model": shapes, "replica": held / layout.base_nbytes, "process": process / bf16}


def _await(swarm: Swarm, version: int) -> None:
    for node in ("bf16", "format"):
        swarm.until(node, lambda state: state["nodes"][0]["held"] == [0, version])


def main(arguments: list[str] | None = None) -> int:
    """Measure, and print a row. `arguments`: without the program's name."""
    parser = json_parser(__doc__)
    parser.add_argument("--mb", type=float, default=1000, help="bytes of the model in bf16, in MB (default 1000)")
    parser.add_argument("--format", default="int4-group-e8", choices=sorted(FORMATS))
    parser.add_argument("--embeddings", type=float, default=0.03, help="the embedding's share of the bytes (0.03)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="format-memory-") as folder:
        row = measure(Path(folder), options.mb, options.format, options.embeddings)
    row["known"] = [reckon(shapes, options.format) for shapes in _KNOWN]
    if options.json:
        print(json.dumps({"scenario": "format_memory", **row}, indent=1))
        return 0
    print(f"{row['format']}, a model of {row['model_bytes'] / 1e6:.0f} MB, {os.cpu_count()} cores")
    for node, memory in row["nodes"].items():
        print(f"  {node:<7} replica {memory['shared'] / 1e6:7.0f} MB, besides {memory['anonymous'] / 1e6:6.0f} MB")
    print(f"  ratio   replica {row['replica']:.3f} (reckoned {row['reckoned']:.3f}), process {row['process']:.3f}")
    for known in row["known"]:
        print(f"  reckoned for {known['model']}: replica {known['replica']:.3f}, process {known['process']:.3f}")
    return 0


if __name__ == "__main__":
    run_as_program(main)
