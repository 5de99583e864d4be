"""Measures what a gigabyte costs each process in CPU time: our seed, publisher and relays, a relay in C, libtorrent.

    python -m scenarios.bench.cpu [--mb 400] [--versions 3] [--no-libtorrent] [--json]

Everything runs on this machine's loopback. The file goes from a seed to a relay that receives it and forwards it once,
and from there to a relay that only receives. The first version is reported apart from later ones, since a seed that has
published nothing yet does not know how large versions are. CPU time is user and system time of the whole process, until
the file is verified and on disk, less what the process uses in the same time when idle, divided by the file's size.

`C` is the same job without an interpreter: one thread, OpenSSL, TLS 1.3 in, BLAKE3 of each piece, the same disk, TLS
out. `c_relay.c` is compiled when the benchmark starts, which needs a C compiler and OpenSSL's headers (apt-get install
build-essential libssl-dev). Its BLAKE3 is that of libLLVM 15 or later (apt-get install libllvm15). Without that it
hashes with OpenSSL's BLAKE2b, and the report replaces the time of it by what BLAKE3 takes in Python for pieces of the
same size. libtorrent, which does not encrypt, is measured if it can be installed.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from blake3 import blake3
from libp2p.crypto.ed25519 import create_new_key_pair

from codec.errors import UsageError
from node.status.schema import SeedStatus
from scenarios.emulator import torrents
from scenarios.harness.processes import next_line
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in
from scenarios.harness.usage import ProcessUsage
from swarm.transport.connection.certificate import make_certificate

__all__ = ["main", "measure_c", "measure_libtorrent", "measure_swarm", "publish_raw", "until"]

FORWARDS: Final = "relay-forwards"
RECEIVES: Final = "relay-receives"
PIECE_BYTES: Final = 256 << 10
PATIENCE_S: Final = 120.0
SETTLE_S: Final = 1.0
"""After the last relay has a version: its last chunks are on disk within this."""
IDLE_S: Final = 3.0
IDLE_LOOKS: Final = 4
"""How long, and how often, the processes are watched before anything is published; the least that each used counts, as
it may still be busy with its start."""
LINK: Final = ("--up-mbit", "1000")
"""What each process is told of its uplink: enough for the largest pieces, and a rate at which nothing is paced."""


# ------------------------------------------------------------ ours


def measure_swarm(folder: Path, file_bytes: int, versions: int) -> list[dict[str, Any]]:
    """Publish `versions` random files to a relay that forwards everything to another one.

    Returns a row for each process: `first` and `later`, CPU seconds a GB; `sent`, copies of the file that it sent;
    `idle_ms_s`, CPU milliseconds that it uses in each second when nothing is published.
    """
    with swarm_in(folder, patience_s=STARTED_WITHIN_S) as swarm:
        swarm.seed(None, "--raw-mb", str(file_bytes // 1_000_000 + 1), "--preset", "wan", *LINK, SWARM_LOG="info")
        for name, more in ((FORWARDS, LINK), (RECEIVES, ("--up-mbit", "0", "--down-mbit", LINK[1]))):
            swarm.start(name, "relay", swarm.ticket("--nodes", "1"), *LOOPBACK, "--name", name, *more)
            swarm.until_seed(f"{name} joins", lambda seed, name=name: any(node.name == name for node in seed.nodes))
        swarm.until_seed("one relay feeds the other", _one_feeds_the_other)
        time.sleep(SETTLE_S)
        names = {"seed": swarm.pid("seed"), FORWARDS: swarm.pid(FORWARDS), RECEIVES: swarm.pid(RECEIVES)}
        idle = _idle(names)
        found: dict[str, list[float]] = {name: [] for name in [*names, "publisher"]}
        sent_bytes = dict.fromkeys(names, 0)
        for number in range(1, versions + 1):
            file = folder / "file"
            file.write_bytes(secrets.token_bytes(file_bytes))
            before, began_s = {name: ProcessUsage(pid).cpu_s for name, pid in names.items()}, time.monotonic()
            earlier = {name: _sent_bytes(swarm, name) for name in names}
            found["publisher"].append(publish_raw(swarm.home(), file))
            for name in (FORWARDS, RECEIVES):
                until(lambda name=name, number=number: _holds(swarm, name, number))
            time.sleep(SETTLE_S)
            for name, pid in names.items():
                passed_s = time.monotonic() - began_s
                found[name].append(ProcessUsage(pid).cpu_s - before[name] - idle[name] * passed_s)
                sent_bytes[name] = _sent_bytes(swarm, name) - earlier[name]
        gb = file_bytes / 1e9
        return [
            {
                "process": name,
                "first": spent[0] / gb,
                "later": statistics.median(spent[1:] or spent) / gb,
                "sent": sent_bytes.get(name, 0) / file_bytes,
                "idle_ms_s": 1000 * idle.get(name, 0.0),
            }
            for name, spent in found.items()
        ]


def _idle(pids: dict[str, int]) -> dict[str, float]:
    """The CPU seconds that each process uses a second when nothing is published."""
    looks: dict[str, list[float]] = {name: [] for name in pids}
    for _ in range(IDLE_LOOKS):
        before = {name: ProcessUsage(pid).cpu_s for name, pid in pids.items()}
        time.sleep(IDLE_S)
        for name, pid in pids.items():
            looks[name].append((ProcessUsage(pid).cpu_s - before[name]) / IDLE_S)
    return {name: min(found) for name, found in looks.items()}


def _one_feeds_the_other(status: SeedStatus) -> bool:
    """Whether the relay that can forward is the only child of the seed in every stripe."""
    slots = {node.name: node.slot for node in status.nodes}
    return bool(status.stripes) and all(row.get(slots[RECEIVES], -1) == slots[FORWARDS] for row in status.stripes)


def publish_raw(home: Path, file: Path) -> float:
    """Publish a raw file, and return the CPU seconds of the publishing process."""
    command = [sys.executable, "-m", "node.cli", "publish", str(file), "--raw", "--home", str(home)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UsageError(f"publish failed: {printed[-500:]}")
    return used.ru_utime + used.ru_stime


def _holds(swarm: Swarm, name: str, number: int) -> bool:
    held = swarm.own_status(name).held
    return held is not None and held[1] == number


def _sent_bytes(swarm: Swarm, name: str) -> int:
    return swarm.seed_status().sent_bytes if name == "seed" else swarm.own_status(name).sent_bytes


def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds. It asks relays for their status, which costs them CPU time, so it asks seldom."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise UsageError(f"a relay did not have the file within {PATIENCE_S:.0f} s")
        time.sleep(0.5)


# ------------------------------------------------------------ C


def measure_c(folder: Path, file_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """The same way in C: one process pushes, one forwards, one receives. Medians of `repeats` runs.

    Raises `UsageError` when the program cannot be compiled.
    """
    program = _compiled(folder)
    file, certificate = folder / "file", folder / "certificate.pem"
    certificate.write_text("".join(make_certificate(create_new_key_pair())))
    file.write_bytes(secrets.token_bytes(file_bytes))
    library = _llvm()
    correction_s_gb = 0.0 if library else _blake3_s_gb()
    rows: dict[str, list[float]] = {"pusher": [], FORWARDS: [], RECEIVES: []}
    hashes: dict[str, list[float]] = {FORWARDS: [], RECEIVES: []}
    for _ in range(repeats):
        words = (str(certificate), str(folder / "store"), str(file_bytes), library or "blake2b")
        with (
            _c_process(program, "take", *words) as last,
            _c_process(program, "take", words[0], f"{words[1]}2", *words[2:], _line(last)) as relay,
            _c_process(program, "push", _line(relay), str(certificate), str(file)) as pusher,
        ):
            for name, process in {"pusher": pusher, FORWARDS: relay, RECEIVES: last}.items():
                report = json.loads(_line(process))
                spent_s_gb = report["cpu_s"] / (file_bytes / 1e9)
                hash_s_gb = report["hash_s"] / (file_bytes / 1e9)
                if name in hashes:
                    hashes[name].append(correction_s_gb or hash_s_gb)
                    spent_s_gb += correction_s_gb - hash_s_gb if correction_s_gb else 0.0
                rows[name].append(spent_s_gb)
    return [
        {"process": f"C {name}", "later": statistics.median(spent), "hash": statistics.median(hashes.get(name, [0.0])),
         "hash_by": library or "BLAKE2b, corrected to BLAKE3 in Python"}
        for name, spent in rows.items()
    ]  # fmt: skip


def _compiled(folder: Path) -> Path:
    program = folder / "c_relay"
    source = Path(__file__).with_name("c_relay.c")
    command = ["cc", "-O2", "-o", str(program), str(source), "-lssl", "-lcrypto", "-ldl"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UsageError("no C compiler: apt-get install build-essential libssl-dev") from None
    if ended.returncode:
        missing = "openssl/" in ended.stderr or "-lssl" in ended.stderr
        hint = "apt-get install libssl-dev" if missing else ended.stderr.strip()[-300:]
        raise UsageError(f"{source.name} does not compile: {hint}")
    return program


def _llvm() -> str | None:
    """The newest libLLVM that the linker knows and that has BLAKE3; None when there is none."""
    listed = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = {int(number): path for number, path in re.findall(r"libLLVM[-.](?:so\.)?(\d+)\S* .*=> (\S+)", listed)}
    newest = max(found, default=0)
    return found[newest] if newest >= 15 else None


def _blake3_s_gb() -> float:
    data = secrets.token_bytes(64 << 20)
    began_s = time.process_time()
    for at in range(0, len(data), PIECE_BYTES):
        blake3(memoryview(data)[at : at + PIECE_BYTES]).digest()
    return (time.process_time() - began_s) / (len(data) / 1e9)


@contextlib.contextmanager
def _c_process(program: Path, *words: str) -> "Iterator[subprocess.Popen[str]]":
    with subprocess.Popen([program, *words], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise UsageError(f"{process.args[0]} ended early")  # type: ignore[index]
    return line


# ------------------------------------------------------------ libtorrent


def measure_libtorrent(folder: Path, file_bytes: int) -> list[dict[str, Any]]:
    """A session that has the file, one that fetches it, and one that fetches it from that one alone.

    Raises `UsageError` when libtorrent cannot be installed.
    """
    with torrents.sessions(folder, file_bytes, {"origin": None, FORWARDS: "origin", RECEIVES: FORWARDS}) as processes:
        before = {name: ProcessUsage(process.pid).cpu_s for name, process in processes.items()}
        torrents.begin(processes)
        for name in (FORWARDS, RECEIVES):
            next_line(processes[name], "had", PATIENCE_S)
        time.sleep(SETTLE_S)
        spent = {name: ProcessUsage(process.pid).cpu_s - before[name] for name, process in processes.items()}
    return [{"process": f"libtorrent {name}", "later": used / (file_bytes / 1e9)} for name, used in spent.items()]


# ------------------------------------------------------------ the report


def report(file_bytes: int, versions: int, *, with_libtorrent: bool) -> dict[str, Any]:
    """Measure everything. What cannot be measured here is named under `left_out`."""
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    measurements: list[tuple[str, Callable[[Path], list[dict[str, Any]]]]] = [
        ("ours", lambda folder: measure_swarm(folder, file_bytes, versions)),
        ("C", lambda folder: measure_c(folder, file_bytes, versions)),
    ]
    if with_libtorrent:
        measurements.append(("libtorrent", lambda folder: measure_libtorrent(folder, file_bytes)))
    for subject, measure in measurements:
        print(f"{subject} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
            try:
                rows += measure(Path(folder))
            except UsageError as error:
                left_out.append(f"{subject}: {error}")
    yardstick = {row["process"]: row["later"] for row in rows}
    for row in rows:
        compared = yardstick.get(f"C {row['process']}")
        if compared:
            row["x_c"] = row["later"] / compared
            row["x_c_first"] = row["first"] / compared
    return {"scenario": "cpu", "file_bytes": file_bytes, "cores": os.cpu_count(), "rows": rows, "left_out": left_out}


def _print(found: dict[str, Any]) -> None:
    columns = ("first", "later", "x_c", "x_c_first", "sent", "hash", "idle_ms_s")
    print(f"{'CPU s a GB of the file':32}" + "".join(f"{name:>11}" for name in columns))
    for row in found["rows"]:
        cells = [row.get(name) for name in columns]
        print(f"{row['process']:32}" + "".join(f"{'' if cell is None else f'{cell:.2f}':>11}" for cell in cells))
    for line in found["left_out"]:
        print(f"left out: {line}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=400, help="megabytes of the file (default 400)")
    parser.add_argument("--versions", type=int, default=3, help="files published, and runs of the C relay (default 3)")
    parser.add_argument("--no-libtorrent", action="store_true", help="leave out libtorrent")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    found = report(options.mb * 1_000_000, options.versions, with_libtorrent=not options.no_libtorrent)
    if options.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 1 if any(not line.startswith("libtorrent") for line in found["left_out"]) else 0


if __name__ == "__main__":
    sys.exit(main())
