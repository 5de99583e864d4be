"""Measures what a publish costs: processor time and peak memory of the seed and of the publishing process.

Real processes on this machine: a seed, `swarm-node publish` for each version and, for a raw file, one relay that
receives it. The model is made up: a step of 1 % density, there and back. For comparison it measures BLAKE3 of the same
bytes and one read of both versions.

    python -m scenarios.bench.publish --gb 3.4
    python -m scenarios.bench.publish --gb 0.2 --versions 3 --raw-gb 0.4 --json
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from blake3 import blake3

from codec import Layout, TensorSpec, write_checkpoint
from codec.bits import Bits
from codec.layout import BLOCK_ELEMENTS
from scenarios.bench.codec_data import fabricate
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in, swarm_on

__all__ = ["main", "measure_folder", "measure_raw"]

_TENSOR: Final = (16 << 10, 1 << 10)
_DENSITY: Final = 0.01
_TICKS_S: Final = os.sysconf("SC_CLK_TCK")
_LOOK_S: Final = 0.002
_QUIET_S: Final = 1.0
"""A process that used no processor time for this long has finished its work on a version."""


class _Ended(NamedTuple):
    """A `swarm-node publish` that ended. `cpu_s`: user and system. `opened_s`: from its start until the seed had opened
    the version. `peak`: bytes, its largest resident set. `seed_peak`: bytes of the seed's largest without files, which
    are code that processes share and that the system can drop."""

    cpu_s: float
    opened_s: float
    seconds: float
    peak: int
    seed_peak: int
    report: dict[str, Any]


def measure_folder(folder: Path, model_bytes: int, versions: int) -> dict[str, Any]:
    """Publish a checkpoint folder `versions` times, each 1 % away from the one before."""
    n_tensors = max(1, round(model_bytes / (2 * _TENSOR[0] * _TENSOR[1])))
    layout = Layout(tuple(TensorSpec(f"layer.{i:04}.weight", "BF16", _TENSOR) for i in range(n_tensors)))
    parts = list(fabricate("16m", _DENSITY))
    bits = [np.concatenate([getattr(part, name) for part in parts]) for name in ("old", "new")]
    paths = [_write(folder / name, layout, words) for name, words in zip(("base", "next"), bits, strict=True)]
    floor = _floor(*bits)
    with swarm_on(folder, paths[0]) as swarm:
        rows = [_version(swarm, layout.nbytes, str(paths[(number + 1) % 2])) for number in range(versions)]
    return {"kind": "folder", "bytes": layout.nbytes, "floor_s_gb": floor, "rows": rows}


def measure_raw(folder: Path, file_bytes: int, versions: int) -> dict[str, Any]:
    """Publish `versions` random files through a raw seed to one relay."""
    with swarm_in(folder, patience_s=STARTED_WITHIN_S) as swarm:
        swarm.seed(None, "--raw-mb", str(-(-file_bytes // 10**6)))
        swarm.start("relay", "relay", swarm.ticket("--nodes", "1"), *LOOPBACK)
        swarm.until_seed("the relay has joined", lambda seed: len(seed.nodes) == 1)
        rows = []
        for number in range(versions):
            file = folder / "file"
            file.write_bytes(np.random.default_rng(number).bytes(file_bytes))
            rows.append(_version(swarm, file_bytes, "--raw", str(file), receiver="relay"))
    return {"kind": "raw file", "bytes": file_bytes, "rows": rows}


def _version(swarm: Swarm, nbytes: int, *words: str, receiver: str | None = None) -> dict[str, Any]:
    """Publish once. CPU seconds a GB, and peaks as multiples of `nbytes`, by role."""
    roles = ("seed", *([receiver] if receiver else ()))
    for role in roles:
        _settle(swarm.pid(role))
    before = {role: _cpu_s(swarm.pid(role)) for role in roles}
    faults = {role: _faults(swarm.pid(role)) for role in roles}
    for role in roles:
        Path(f"/proc/{swarm.pid(role)}/clear_refs").write_text("5")  # the peak begins again
    ended = _publish(swarm, words)
    for role in roles:
        _settle(swarm.pid(role))
    gb = nbytes / 1e9
    cpu = {role: (_cpu_s(swarm.pid(role)) - before[role]) / gb for role in roles} | {"publisher": ended.cpu_s / gb}
    peaks = {role: _status_bytes(swarm.pid(role), "VmHWM") / nbytes for role in roles}
    anonymous = {role: _status_bytes(swarm.pid(role), "RssAnon") for role in roles}
    return {
        "version": ended.report["version"],
        "delta_bytes": ended.report["delta_bytes"],
        "opened_s": ended.opened_s,
        "seconds": ended.seconds,
        "cpu_s_gb": cpu,
        "peak_models": peaks | {"publisher": ended.peak / nbytes},
        "seed_peak_without_files_models": ended.seed_peak / nbytes,
        "anonymous_bytes": anonymous,
        "faults_gb": {role: (_faults(swarm.pid(role)) - faults[role]) / gb for role in roles},
    }


def _publish(swarm: Swarm, words: tuple[str, ...]) -> _Ended:
    log = swarm.folder / "seed.log"
    looked = log.stat().st_size
    command = [sys.executable, "-m", "node.cli", "publish", *words, "--json", "--home", str(swarm.home())]
    seed = swarm.pid("seed")
    began, opened_s, peak, seed_peak = time.monotonic(), None, 0, 0
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out)
        while True:
            peak = max(peak, _status_bytes(process.pid, "VmHWM"))  # `ru_maxrss` would include this process's, from fork
            seed_peak = max(seed_peak, _status_bytes(seed, "RssAnon") + _status_bytes(seed, "RssShmem"))
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if opened_s is None and b'"publishing"' in log.read_bytes()[looked:]:
                opened_s = time.monotonic() - began
            if pid:
                break
            time.sleep(_LOOK_S)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - began
        assert process.returncode == 0, "the publish failed; its error is above"
        assert opened_s is not None
        out.seek(0)
        report = json.load(out)
    return _Ended(usage.ru_utime + usage.ru_stime, opened_s, seconds, peak, seed_peak, report)


def _settle(pid: int) -> None:
    """Wait until a process has been idle for a moment."""
    while True:
        before = _cpu_s(pid)
        time.sleep(_QUIET_S)
        if _cpu_s(pid) - before < 0.05 * _QUIET_S:
            return


def _cpu_s(pid: int) -> float:
    """User and system seconds of a process so far, all threads and ended children together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS_S


def _faults(pid: int) -> int:
    """Page faults of a process so far that needed no disk."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


def _status_bytes(pid: int, name: str) -> int:
    """A field of a process's status; 0 once the process has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)


def _write(folder: Path, layout: Layout, words: Bits) -> Path:
    whole = np.resize(words, layout.tensors[0].elements)
    write_checkpoint(folder, layout, lambda name: whole, {"config.json": b'{"model_type": "none"}'})
    return folder


def _floor(old: Bits, new: Bits) -> dict[str, float]:
    """CPU seconds a GB of BLAKE3, block by block, and of comparing two versions that lie in memory."""
    starts = range(0, new.size, BLOCK_ELEMENTS)
    gb = new.nbytes / 1e9

    def read_both() -> None:
        for at in starts:
            part = slice(at, at + BLOCK_ELEMENTS)
            np.bitwise_xor(old[part].view(np.uint64), new[part].view(np.uint64), out=xor).max()

    xor = np.empty(BLOCK_ELEMENTS // 4, np.uint64)
    blocks = [new[at : at + BLOCK_ELEMENTS].view(np.uint8).data for at in starts]
    hashing = _least_cpu_s(lambda: [blake3(block).digest() for block in blocks])
    return {"blake3": hashing / gb, "read_both": _least_cpu_s(read_both) / gb}


def _least_cpu_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def _table(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['kind']}, {found['bytes'] / 1e9:.2f} GB"
    floor = sum(found.get("floor_s_gb", {}).values())
    if floor:
        parts = ", ".join(f"{name} {value:.3f}" for name, value in found["floor_s_gb"].items())
        yield f"  BLAKE3 + one read of both: {floor:.3f} CPU s a GB ({parts})"
    for row in found["rows"]:
        cpu, peaks = row["cpu_s_gb"], row["peak_models"]
        shown = ", ".join(f"{role} {value:.2f} (peak {peaks[role]:.2f} x)" for role, value in cpu.items())
        ratio = f"; seed + publisher {(cpu['seed'] + cpu['publisher']) / floor:.2f} x" if floor else ""
        yield (
            f"  version {row['version']}: opens after {row['opened_s']:.2f} s, sealed after {row['seconds']:.2f} s, "
            f"{row['delta_bytes'] / 1e6:.1f} MB; CPU s a GB: {shown}{ratio}; "
            f"seed's peak without files {row['seed_peak_without_files_models']:.2f} x, "
            f"its anonymous memory afterwards {row['anonymous_bytes']['seed'] / 1e6:.0f} MB; "
            f"page faults a GB: {', '.join(f'{role} {count:,.0f}' for role, count in row['faults_gb'].items())}"
        )


@contextmanager
def _work_folder(where: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=where) as folder:
        yield Path(folder)


def main(arguments: list[str] | None = None) -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a command that compiles its modules each time measures that
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model; 0: none (default 1)")
    parser.add_argument("--raw-gb", type=float, default=0.0, help="size of a raw file; 0: none (default)")
    parser.add_argument("--versions", type=int, default=3, help="versions of each (default 3)")
    parser.add_argument("--folder", type=Path, help="where to put it, three times its size (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
    options = parser.parse_args(arguments)
    found = []
    with _work_folder(options.folder) as folder:
        if options.gb:
            (folder / "model").mkdir()
            found.append(measure_folder(folder / "model", round(options.gb * 1e9), options.versions))
        if options.raw_gb:
            found.append(measure_raw(folder / "raw", round(options.raw_gb * 1e9), options.versions))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(line for part in found for line in _table(part)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
