"""Swarms of real processes over loopback, started with the command line, and always ended after the test."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec import FileSpec, Layout, TensorSpec, write_checkpoint
from codec.replica import Replica
from codec.sign import Key
from node.settings.ticket import Ticket
from node.status.query import ask
from node.status.schema import to_plain
from swarm.protocol.core.documents import Capability, seal
from swarm.transport.base import Unreachable

PATIENCE_S = 45.0
"""Default time limit, s: CI has two busy cores, and the first use of a kernel compiles it."""
CONFIG = b'{"model_type": "none"}'
LOOPBACK = ("--listen", "127.0.0.1:0")
NODE = ("--engine", "none", *LOOPBACK)

State = dict[str, Any]
Words = list[np.ndarray]


# ------------------------------------------------------------ checkpoints


def weights(tensors: int = 24, elements: int = 60_000, seed: int = 0) -> Words:
    """The bf16 bits (uint16) of `tensors` tensors of one block each: normal values with a deviation of 0.02."""
    rng = np.random.default_rng(seed)
    return [
        ((0.02 * rng.standard_normal(elements)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        for _ in range(tensors)
    ]


def step(before: Words, seed: int, density: float = 0.02) -> Words:
    """The weights after a training step: a share `density` of each tensor's elements has its lowest bit flipped."""
    rng = np.random.default_rng(seed)
    after = [tensor.copy() for tensor in before]
    for tensor in after:
        tensor[rng.choice(len(tensor), int(density * len(tensor)), replace=False)] ^= 1
    return after


def layout_of(words: Words) -> Layout:
    from blake3 import blake3

    tensors = tuple(TensorSpec(f"layer.{i:03}.weight", "BF16", (len(tensor),)) for i, tensor in enumerate(words))
    return Layout(tensors, (FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest()),))


def checkpoint(folder: Path, words: Words) -> Path:
    """Write a Hugging Face folder with these bits; returns it."""
    layout = layout_of(words)
    by_name = {spec.name: tensor for spec, tensor in zip(layout.tensors, words, strict=True)}
    write_checkpoint(folder, layout, by_name.__getitem__, {"config.json": CONFIG})
    return folder


def root_of(words: Words) -> str:
    """The state root of these bits, in hex, computed in the test's own process."""
    layout = layout_of(words)
    replica = Replica.create(layout)
    from codec.staging import block_hash

    for block, tensor in enumerate(words):
        replica.write_block(block, tensor.tobytes(), block_hash(tensor))
    return replica.root.hex()


# ------------------------------------------------------------ processes


class Ended:
    """A command that has ended: exit code, stdout, stderr, duration."""

    def __init__(self, code: int, out: str, err: str, seconds: float) -> None:
        self.code, self.out, self.err, self.seconds = code, out, err, seconds

    @property
    def error_lines(self) -> str:
        """The text for the user: the lines on stderr that are not log lines."""
        return "\n".join(line for line in self.err.splitlines() if line and not line.startswith("{"))

    def __repr__(self) -> str:
        return f"code {self.code} after {self.seconds:.1f} s\n{self.out}\n{self.err}"


class Swarm:
    """Processes with separate homes under one folder, each the leader of its process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._all: list[subprocess.Popen[bytes]] = []

    def home(self, name: str) -> Path:
        return self.folder / name

    def popen(
        self, name: str, words: Sequence[str], out: Any, *, prefix: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[bytes]:
        variables = os.environ | {"SWARM_HOME": str(self.home(name)), "NUMBA_NUM_THREADS": "1"} | environment
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "node.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE if out == subprocess.PIPE else out,
            env=variables,
            start_new_session=True,
        )
        self._all.append(process)
        return process

    def start(self, name: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start `swarm-node *words` in the background; its output goes to its log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = self.popen(name, words, log, **options)
        return self.running[name]

    def command(self, name: str, *words: str, within_s: float = PATIENCE_S, **options: Any) -> Ended:
        """Run `swarm-node *words` and wait until it ends."""
        began = time.monotonic()
        process = self.popen(name, words, subprocess.PIPE, **options)
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            kill(process)
            out, err = process.communicate()
            pytest.fail(f"{words} did not end in {within_s:.0f} s: {out.decode()} {err.decode()} {self.logs()}")
        return Ended(process.returncode, out.decode(), err.decode(), time.monotonic() - began)

    def together(self, *commands: tuple[str, ...], within_s: float = PATIENCE_S) -> list[Ended]:
        """Run several commands (name, words...) concurrently and wait until all have ended."""
        with ThreadPoolExecutor(len(commands)) as pool:
            return list(pool.map(lambda command: self.command(*command, within_s=within_s), commands))

    def json(self, name: str, *words: str) -> Any:
        """The JSON output of a command that must succeed."""
        ended = self.command(name, *words, "--json")
        assert ended.code == 0, f"{ended} {self.logs()}"
        return json.loads(ended.out)

    def signal(self, name: str, number: int = signal.SIGTERM, within_s: float = 15.0) -> int:
        """Send the process a signal and wait until it ends; returns its exit code (-9 for SIGKILL)."""
        process = self.running.pop(name)
        process.send_signal(number)
        try:
            return process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            kill(process)
            pytest.fail(f"{name} did not end on signal {number}: {self.log(name)}")

    def ends(self, name: str, within_s: float = PATIENCE_S) -> int:
        """Wait until the process ends by itself; returns its exit code."""
        process = self.running.pop(name)
        try:
            return process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            kill(process)
            pytest.fail(f"{name} did not end in {within_s:.0f} s: {self.log(name)}")

    def state(self, name: str) -> State:
        """The output of `status --json`; empty while the process does not answer."""
        try:
            return to_plain(ask(self.home(name)))
        except Unreachable:
            return {}

    def until(self, name: str, condition: Callable[[State], bool], within_s: float = PATIENCE_S) -> State:
        """Wait until the state of the process `name` meets the condition; returns the state."""
        deadline = time.monotonic() + within_s
        state: State = {}
        while time.monotonic() < deadline:
            if (code := self.running[name].poll()) is not None:
                pytest.fail(f"{name} ended with {code}: {self.log(name)}")
            state = self.state(name)
            if state and condition(state):
                return state
            time.sleep(0.05)
        pytest.fail(f"{name} is at {state}: {self.log(name)}")

    def until_logged(self, name: str, pattern: str, within_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + within_s
        while not re.search(pattern, self.log(name, 1 << 20)):
            if time.monotonic() > deadline:
                pytest.fail(f"{name} never logged {pattern}: {self.log(name)}")
            time.sleep(0.02)

    def until_there(self, name: str, pattern: str, within_s: float = PATIENCE_S) -> None:
        """Wait for a file that matches `pattern` in the home of `name`."""
        deadline = time.monotonic() + within_s
        while not any(self.home(name).glob(pattern)):
            assert time.monotonic() < deadline, f"{name} has no {pattern}: {self.log(name)}"
            time.sleep(0.02)

    def log(self, name: str, last: int = 4000) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-last:] if path.exists() else ""

    def logs(self) -> str:
        """The last log lines of all processes started with `start`, and the exit codes of those that ended."""
        return "\n".join(f"--- {name} ({process.poll()}): {self.log(name)}" for name, process in self.running.items())

    def forget(self, *names: str) -> None:
        """End these processes, if they run, and remove their logs."""
        for name in names:
            if name in self.running:
                kill(self.running.pop(name))
            (self.folder / f"{name}.log").unlink(missing_ok=True)

    def close(self) -> list[int]:
        """Kill every remaining process group; returns the ids of groups in which a process outlived its leader."""
        orphans = []
        for process in self._all:
            led = process.poll() is None
            kill(process)
            if not led and group_alive(process.pid):
                orphans.append(process.pid)
        return orphans

    # ------------------------------------------------------------ seeds and nodes

    def seed(self, base: Path, *words: str, name: str = "seed", **options: Any) -> None:
        """Start a seed and wait until it serves."""
        listen = () if "--listen" in words else LOOPBACK
        preset = () if "--preset" in words else ("--preset", "loopback")
        self.start(name, "seed", "--base", str(base), *listen, *preset, *words, **options)
        self.until(name, lambda state: state["role"] == "seed")

    def ticket(self, *words: str, name: str = "seed") -> str:
        return self.json(name, "invite", *words)["ticket"]

    def publish(self, folder: Path, *words: str, name: str = "seed") -> State:
        return self.json(name, "publish", str(folder), *words)

    def node(self, name: str, ticket: str, *words: str, **options: Any) -> None:
        self.start(name, "join", ticket, *NODE, *words, **options)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def group_alive(leader: int) -> bool:
    """Whether a process lives in the process group of `leader`."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def swarm_in(folder: Path) -> Iterator[Swarm]:
    """A swarm whose processes are all killed afterwards. Fails if a process outlived the leader of its group."""
    folder.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(folder)
    try:
        yield swarm
    finally:
        orphans = swarm.close()
    assert not orphans, f"process groups {orphans} outlived their leaders"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def ticket_of(key: Key, port: int, *, signer: Key | None = None, expires_s: float = 3600.0) -> str:
    """A ticket as `invite` prints it for the seed with this key at this port. `signer`: the key that signs it."""
    capability = Capability(key.public, os.urandom(16), time.time() + expires_s, 10, 0)
    return str(Ticket(key.public, (f"/ip4/127.0.0.1/tcp/{port}",), seal(capability, signer or key), "loopback"))


# ------------------------------------------------------------ conditions and checks


def holds(root: str) -> Callable[[State], bool]:
    """Condition on a node's own state: it holds these bits, and no version is on its way."""
    return lambda state: state["nodes"][0]["root"] == root and state["nodes"][0]["phase"] == "idle"


def all_hold(version: Sequence[int], members: int) -> Callable[[State], bool]:
    """Condition on a seed's state: it has this number of members, and each reported the whole version."""
    wanted = [(list(version), 1.0)] * members
    return lambda state: [(node["held"], node["catching_up"]) for node in state["nodes"]] == wanted


def check(ended: Ended, code: int, *patterns: str, within_s: float | None = None) -> None:
    """Assert that the command failed cleanly: exit code, a short message that matches the patterns, no traceback."""
    assert ended.code == code, ended
    assert "Traceback" not in ended.err, ended
    assert "This is a bug" not in ended.err, ended
    lines = ended.error_lines.splitlines()
    assert lines, ended
    assert lines[-1].startswith("swarm-node: "), ended
    assert len(lines[-1]) < 500, ended
    assert ended.out == "", ended
    for pattern in patterns:
        assert re.search(pattern, lines[-1]), (pattern, ended)
    if within_s is not None:
        assert ended.seconds < within_s, ended
