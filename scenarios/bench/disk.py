"""Measures what starts, joins, versions and restarts cost a real process: CPU time, bytes read, bytes written.

A seed and nodes run on loopback with a synthetic model. Everything runs twice, with a large and with a small model, and
the table has the difference, divided by the difference of the models' sizes: so the interpreter, its imports and idle
heartbeats do not count. Compare with the first row: reading the model's file and hashing it with BLAKE3.

    python -m scenarios.bench.disk
    python -m scenarios.bench.disk --gb 0.5 --folder /mnt/disk --json
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from blake3 import blake3

from codec import Layout, TensorSpec, write_checkpoint
from node.status.schema import OwnStatus
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm
from swarm.transport.base import Unreachable

__all__ = ["main", "measure"]

_TENSOR: Final = (1 << 10, 1 << 10)
"""One block."""
_DENSITY: Final = 0.01
_SMALL_BLOCKS: Final = 8
_FEW: Final = 0.1
"""The share of the blocks that the version `few` changes."""
_QUIET_S: Final = 1.0
"""Seconds, in which a process that is done spends less than `_QUIET_CPU_S`."""
_QUIET_CPU_S: Final = 0.06
_WITHIN_S: Final = 300.0
_CHAIN: Final = 5
"""Versions since the checkpoint at the restarts."""


class Spent(NamedTuple):
    """Of one process: CPU seconds; bytes that it read and wrote by system calls, and dirtied in files in any way."""

    cpu_s: float
    read: int
    wrote: int
    dirtied: int

    def minus(self, other: "Spent") -> "Spent":
        return Spent(
            self.cpu_s - other.cpu_s, self.read - other.read, self.wrote - other.wrote, self.dirtied - other.dirtied
        )


_NOTHING: Final = Spent(0.0, 0, 0, 0)


def measure(folder: Path, model_bytes: int) -> dict[str, Any]:
    """The rows of the table. `folder`: on the disk to measure, with room for eight models."""
    large = max(_SMALL_BLOCKS * 2, round(model_bytes / (2 * _TENSOR[0] * _TENSOR[1])))
    sizes = {"first": _SMALL_BLOCKS, "small": _SMALL_BLOCKS, "large": large}
    found = [_run(folder / name, blocks) for name, blocks in sizes.items()][1:]  # the first may compile kernels
    gb = (large - _SMALL_BLOCKS) * 2 * _TENSOR[0] * _TENSOR[1] / 1e9
    rows = []
    for name in found[1]:
        spent = found[1][name].minus(found[0][name])
        rows.append(
            {
                "what": name,
                "cpu_s_gb": spent.cpu_s / gb,
                "read_models": spent.read / gb / 1e9,
                "written_models": spent.dirtied / gb / 1e9,
            }
        )
    return {"scenario": "disk", "model_bytes": large * 2 * _TENSOR[0] * _TENSOR[1], "few": _FEW, "rows": rows}


class _Processes:
    """The swarm of one run, and what its processes have spent."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.swarm = Swarm(folder, patience_s=STARTED_WITHIN_S)

    def start(self, name: str, *words: str) -> None:
        self.swarm.start(name, *words, *LOOPBACK)

    def join(self, name: str, ticket: str, *words: str) -> Spent:
        """Start a node, and return what it has spent when it holds the head and is quiet."""
        self.start(name, "join", ticket, "--engine", "none", "--name", name, *words)
        return self.settled(name)

    def spent(self, name: str) -> Spent:
        return _spent(self.swarm.pid(name))

    def settled(self, name: str, held: tuple[int, int] | None = None) -> Spent:
        """Wait until a node holds a version and hardly uses a processor."""
        if name != "seed":
            self.until(name, lambda own: own.held is not None and (held is None or tuple(own.held) == held))
        deadline, before = time.monotonic() + _WITHIN_S, self.spent(name)
        while time.monotonic() < deadline:
            time.sleep(_QUIET_S)
            now = self.spent(name)
            if now.cpu_s - before.cpu_s < _QUIET_CPU_S and now.wrote - before.wrote < 1 << 20:
                break
            before = now
        return self.spent(name)

    def until(self, name: str, condition: Callable[[OwnStatus], bool]) -> None:
        deadline = time.monotonic() + _WITHIN_S
        while time.monotonic() < deadline:
            try:
                own = self.swarm.own_status(name)
            except Unreachable:
                own = None
            if own is not None and own.phase == "idle" and condition(own):
                return
            time.sleep(0.02)
        raise SystemExit(f"{name} did not get there: {self.swarm.log(name)}")


def _run(folder: Path, blocks: int) -> dict[str, Spent]:
    """What each step spent, by name."""
    processes, found = _Processes(folder), dict[str, Spent]()
    swarm, rng = processes.swarm, np.random.default_rng(0)
    words = [rng.integers(0x3C00, 0x3D80, _TENSOR[0] * _TENSOR[1], np.uint16) for _ in range(blocks)]
    base = _checkpoint(folder / "base", words)
    found["read and BLAKE3"] = _floor(base / "model.safetensors")
    seed_words = ("seed", "--base", str(base), "--preset", "loopback")
    try:
        processes.start("seed", *seed_words)
        swarm.wait("the seed serves", lambda: swarm.status("seed"), of=["seed"])
        found["seed, first start"] = processes.settled("seed")
        ticket = swarm.ticket("--nodes", "8")
        found["node --model, in RAM, first start"] = processes.join("ram", ticket, "--model", str(base))
        found["node --model, on disk, first start"] = processes.join(
            "disk", ticket, "--model", str(base), "--replica", "disk"
        )
        for place in ("ram", "disk"):
            givers = ("ram", "disk", "seed")
            before = {name: processes.settled(name) for name in givers}
            found[f"empty joiner, {place}"] = processes.join(f"empty-{place}", ticket, "--replica", place)
            after = [processes.settled(name).minus(before[name]) for name in givers]
            found[f"its givers together, {place}"] = Spent(*map(sum, zip(*after, strict=True)))
            swarm.kill(f"empty-{place}")
        for number in range(1, _CHAIN + 1):
            few = number == 2
            for block in range(max(1, round(_FEW * blocks)) if few else blocks):
                words[block] ^= (rng.random(words[block].size) < _DENSITY).astype(np.uint16)
            step = _checkpoint(folder / f"step_{number}", words)
            before = {name: processes.settled(name) for name in ("ram", "disk", "seed")}
            swarm.publish(step)
            for name in ("ram", "disk"):
                spent = processes.settled(name, (0, number)).minus(before[name])
                if number <= 2:
                    label = f"{_FEW:.0%} of the blocks" if few else "all blocks"
                    found[f"node, {name}, a version of {label}"] = spent
            for path in step.iterdir():
                path.unlink()
        for name in ("ram", "disk"):
            where = ("--replica", name)
            for end, number in (("a clean exit", signal.SIGINT), ("a kill", signal.SIGKILL)):
                swarm.signal(name, number)
                processes.start(name, "join", ticket, "--engine", "none", "--name", name, "--model", str(base), *where)
                processes.until(name, lambda own: own.held is not None)
                started = processes.spent(name)
                found[f"node, {name}, start after {end}"] = started
                if end == "a clean exit":
                    found[f"node, {name}, proven after that"] = processes.settled(name).minus(started)
        for end, number in (("a clean exit", signal.SIGINT), ("a kill", signal.SIGKILL)):
            swarm.signal("seed", number)
            processes.start("seed", *seed_words)
            swarm.wait("the seed serves", lambda: swarm.status("seed"), of=["seed"])
            started = processes.spent("seed")
            found[f"seed, start after {end}"] = started
            processes.settled("seed")
    finally:
        swarm.close()
    return found


def _spent(pid: int) -> Spent:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    io = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Spent(cpu_s, int(io["rchar"]), int(io["wchar"]), int(io["write_bytes"]))


def _floor(path: Path) -> Spent:
    """Reading a file into the same memory again and again, and hashing it."""
    buffer, before = bytearray(2 << 20), _spent(os.getpid())
    with path.open("rb", buffering=0) as file:
        for _ in range(2):  # the first turn brings the file into the page cache
            file.seek(0)
            before = _spent(os.getpid())
            while count := file.readinto(buffer):
                blake3(memoryview(buffer)[:count]).digest()
    return _spent(os.getpid()).minus(before)


def _checkpoint(folder: Path, words: list[np.ndarray]) -> Path:
    layout = Layout(tuple(TensorSpec(f"layer.{i:04}.weight", "BF16", _TENSOR) for i in range(len(words))))
    by_name = {spec.name: tensor for spec, tensor in zip(layout.tensors, words, strict=True)}
    write_checkpoint(folder, layout, by_name.__getitem__, {})
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.4, help="size of the large model (default 0.4)")
    parser.add_argument("--folder", type=Path, help="where to put it, eight times its size (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), round(options.gb * 1e9))
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    print(f"a model of {found['model_bytes'] / 1e9:.2f} GB; CPU seconds a GB of model, models read, models written")
    for row in found["rows"]:
        print(f"{row['what']:<44} {row['cpu_s_gb']:6.2f} {row['read_models']:6.2f} {row['written_models']:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
