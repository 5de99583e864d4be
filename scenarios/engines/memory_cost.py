"""Measures what versions cost a node with an engine on a CPU, by where its replica is: memory, disk, the engine.

A seed and one node at a time run on loopback, with a random model and the engine transformers. Each version changes 1 %
of all elements. The rows have, for each version, the CPU time of the node's process and of its engine's, and what the
node read by system calls; at the end, the node's memory and the disk space of its home, as multiples of the model.

    python -m scenarios.engines.memory_cost
    python -m scenarios.engines.memory_cost --mb 100 --versions 2 --json
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import UnsetType

from codec import Checkpoint, write_checkpoint
from codec.bits import Bits
from node.status.schema import OwnStatus
from scenarios.engines.engine_models import make_qwen3
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm
from swarm.transport.base import Unreachable

__all__ = ["main", "measure"]

_PLACES: Final = ("ram", "disk", "engine")
_HIDDEN: Final = 1024
_SETTLED_S: Final = 2.0
_WITHIN_S: Final = 300.0


def measure(folder: Path, model_mb: float, versions: int) -> dict[str, Any]:
    """The rows of the table."""
    layers = max(1, round(model_mb * 1e6 / (2 * (4 * _HIDDEN * _HIDDEN + 3 * _HIDDEN * 3 * _HIDDEN))))
    base = make_qwen3(folder / "base", hidden=_HIDDEN, wide=3 * _HIDDEN, layers=layers, vocabulary=512)
    steps = [base]
    for number in range(1, versions + 2):
        steps.append(_step(steps[-1], folder / f"step_{number}", number))
    rows = [_run(folder / place, place, steps) for place in _PLACES]
    return {"scenario": "memory_cost", "model_bytes": Checkpoint.open(base).layout.nbytes, "rows": rows}


def _step(before: Path, after: Path, seed: int) -> Path:
    checkpoint, rng = Checkpoint.open(before), np.random.default_rng(seed)

    def bits(name: str) -> Bits:
        new = checkpoint.bits(name)
        return new ^ (rng.random(new.size, np.float32) < 0.01).astype(new.dtype)

    write_checkpoint(after, checkpoint.layout, bits, checkpoint.files)
    return after


def _run(folder: Path, place: str, steps: list[Path]) -> dict[str, Any]:
    swarm = Swarm(folder, patience_s=STARTED_WITHIN_S)
    folder.mkdir()
    nbytes = Checkpoint.open(steps[0]).layout.nbytes
    try:
        swarm.seed(steps[0])
        where = ("--replica", place, "--device", "cpu", "--threads", "1", *LOOPBACK)
        swarm.start("node", "join", swarm.ticket(), "--model", str(steps[0]), *where)
        _until(swarm, 0)
        swarm.publish(steps[1])  # the first version compiles kernels, and brings memory to its peak
        own = _until(swarm, 1)
        node, engine = swarm.pid("node"), _child(swarm.pid("node"))
        before = [_cpu_s(node), _cpu_s(engine), _read_bytes(node)]
        for number, step in enumerate(steps[2:], 2):
            swarm.publish(step)
            own = _until(swarm, number)
        count = len(steps) - 2
        spent = [
            now - then for now, then in zip([_cpu_s(node), _cpu_s(engine), _read_bytes(node)], before, strict=True)
        ]
        live = own.live_reads
        return {
            "replica": place,
            "node_cpu_s_gb": spent[0] / count / nbytes * 1e9,
            "engine_cpu_s_gb": spent[1] / count / nbytes * 1e9,
            "read_models": spent[2] / count / nbytes,
            "node_memory_models": own.memory.used_bytes / nbytes,
            "home_models": _disk_bytes(swarm.home("node")) / nbytes,
            "commit_ms": np.median([commit.pause_ms for commit in own.commits[1:]]).item() if own.commits else None,
            "live_reads": None if isinstance(live, UnsetType) else [live.right, live.other],
        }
    finally:
        swarm.close()


def _until(swarm: Swarm, version: int) -> OwnStatus:
    """Wait until the engine is at the version and its node hardly uses a processor."""
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            own = swarm.own_status("node")
        except Unreachable:
            continue
        if own.held == own.engine == (0, version):
            time.sleep(_SETTLED_S)
            return swarm.own_status("node")
    raise SystemExit(f"the node did not get to version {version}: {swarm.log('node')}")


def _child(pid: int) -> int:
    """The engine's process: the only child, of whichever thread."""
    (child,) = (int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split())
    return child


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_bytes(pid: int) -> int:
    return int(dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())["rchar"])


def _disk_bytes(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m scenarios.engines.memory_cost", description=__doc__)
    parser.add_argument("--mb", type=float, default=300.0, help="bytes of the model in bf16, MB")
    parser.add_argument("--versions", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), given.mb, given.versions)
    if given.json:
        print(json.dumps(report))
        return
    print(
        f"model of {report['model_bytes'] / 1e6:.0f} MB; CPU seconds a GB of model, a version; bytes as multiples of it"
    )
    print(f"{'replica':8} {'node CPU':>9} {'engine CPU':>11} {'read':>6} {'memory':>7} {'home':>6} {'commit ms':>10}")
    for row in report["rows"]:
        print(
            f"{row['replica']:8} {row['node_cpu_s_gb']:9.2f} {row['engine_cpu_s_gb']:11.2f} {row['read_models']:6.2f} "
            f"{row['node_memory_models']:7.2f} {row['home_models']:6.2f} {row['commit_ms']:10.1f}"
        )


if __name__ == "__main__":
    main()
