"""A swarm of real processes over real libp2p, controlled only by the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from status_kit import GOLDEN, paths

from node.status.query import ask
from node.status.schema import to_plain
from swarm.transport.base import Unreachable

PATIENCE_S = 120.0
"""Time limit in seconds: two busy cores, and the first use of a kernel compiles it."""


def checkpoint(folder: Path, words: np.ndarray) -> Path:
    """A Hugging Face folder of one bf16 tensor with these bits."""
    folder.mkdir()
    entry = {"dtype": "BF16", "shape": [len(words)], "data_offsets": [0, 2 * len(words)]}
    header = json.dumps({"model.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + words.tobytes())
    (folder / "config.json").write_text('{"model_type": "none"}')
    return folder


class Swarm:
    """Processes with separate homes. `command` runs one until it ends; `start` leaves it running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def _popen(self, name: str, words: tuple[str, ...], out: Any) -> subprocess.Popen[bytes]:
        environment = os.environ | {"SWARM_HOME": str(self.home(name)), "NUMBA_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, "-m", "node.cli", *words], stdout=out, stderr=out, env=environment)

    def home(self, name: str) -> Path:
        return self.folder / name

    def start(self, name: str, *words: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = self._popen(name, words, log)

    def command(self, name: str, *words: str, code: int = 0) -> str:
        process = self._popen(name, words, subprocess.PIPE)
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == code, err.decode()
        return out.decode() if code == 0 else err.decode()

    def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(timeout=30)

    def until(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until the output of `status --json` of the process `name` meets the condition."""
        deadline = time.monotonic() + PATIENCE_S
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            if (process := self.running[name]).poll() is not None:
                pytest.fail(f"{name} ended with {process.returncode}: {self.log(name)}")
            try:
                state = to_plain(ask(self.home(name)))
            except Unreachable:
                state = {}
            if state and condition(state):
                return state
            time.sleep(0.1)
        pytest.fail(f"{name} is at {state}: {self.log(name)}")

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()[-3000:]


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    swarm = Swarm(tmp_path)
    yield swarm
    for process in swarm.running.values():
        process.kill()
        process.wait()


def all_hold(version: list[int], members: int) -> Callable[[dict[str, Any]], bool]:
    return lambda state: [node["held"] for node in state["nodes"]] == [version] * members


def test_the_main_commands_on_a_small_swarm(swarm: Swarm, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first = (rng.standard_normal(300_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    second = first.copy()
    second[rng.choice(len(first), 3000, replace=False)] ^= 1
    base, step_1 = str(checkpoint(tmp_path / "base", first)), str(checkpoint(tmp_path / "step_1", second))

    swarm.start("seed", "seed", "--base", base, "--listen", "127.0.0.1:0", "--preset", "loopback")
    swarm.until("seed", lambda state: state["head"] == [0, 0])
    ticket = json.loads(swarm.command("seed", "invite", "--nodes", "3", "--json"))["ticket"]

    # "box" has the base, "bare" has nothing, and "relay" only forwards chunks.
    swarm.start("box", "join", ticket, "--engine", "none", "--listen", "127.0.0.1:0", "--model", base)
    swarm.start("bare", "join", ticket, "--engine", "none", "--listen", "127.0.0.1:0")
    swarm.start("relay", "relay", ticket, "--listen", "127.0.0.1:0")
    swarm.until("seed", all_hold([0, 0], 3))

    report = json.loads(swarm.command("seed", "publish", step_1, "--json"))
    assert (report["version"], report["changed"]) == (1, 3000)
    state = swarm.until("seed", all_hold([0, 1], 3))
    assert (state["head"], state["root"]) == ([0, 1], report["root"])
    statuses = {name: json.loads(swarm.command(name, "status", "--json")) for name in ("seed", "box", "relay")}
    assert statuses["seed"]["head"] == [0, 1]
    assert set(paths(statuses["seed"])) <= set(GOLDEN["seed"])
    assert paths(statuses["box"]) == GOLDEN["node without engine"]
    assert paths(statuses["relay"]) == GOLDEN["relay"]

    # A fourth machine is refused by a ticket for three, and so is a checkpoint of another model.
    assert "All 3 places" in swarm.command("fourth", "relay", ticket, "--listen", "127.0.0.1:0", code=2)
    other = str(checkpoint(tmp_path / "other", first[:1000]))
    assert "model.weight" in swarm.command("seed", "publish", other, code=2)

    # A second process on the same home is refused; the first continues.
    assert "nother process" in swarm.command("box", "join", ticket, "--engine", "none", code=2)

    # A process that leaves frees its slot at once. A command that finds no seed exits with code 3.
    assert swarm.stop("relay", signal.SIGINT) == 130
    swarm.until("seed", all_hold([0, 1], 2))
    assert swarm.stop("seed") == 143
    assert "swarm-node seed" in swarm.command("seed", "publish", step_1, code=3)
    assert swarm.stop("box") == swarm.stop("bare") == 143
