"""A seed and nodes of their own for the trainer's scenario: real processes on loopback, gone at the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from codec.errors import UsageError
from node.trainers.errors import SwarmDown, SwarmTimeout
from node.trainers.seedlink import ask_state

__all__ = ["Swarm", "swarm_on"]

STARTED_WITHIN_S = 120.0


class Swarm:
    """`home`: the seed's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.home = folder / "seed"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str) -> Path:
        """`swarm-node WORDS` with a home of its own, which is given back."""
        home = self._folder / name
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "node.cli", *words, "--home", str(home)]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=dict(os.environ)
            )
        self._processes.append(process)
        return home

    def ticket(self, nodes: int) -> str:
        words = ["invite", "--nodes", str(nodes), "--json", "--home", str(self.home)]
        ended = subprocess.run([sys.executable, "-m", "node.cli", *words], capture_output=True, check=True)
        return json.loads(ended.stdout)["ticket"]

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for the seed's state to be so. Raises `UsageError` with the last line of a log."""
        deadline = time.monotonic() + STARTED_WITHIN_S
        while True:
            with contextlib.suppress(SwarmDown, SwarmTimeout):
                if condition(ask_state(self.home)["swarm"]):
                    return
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes):
                logs = [path.read_text(errors="replace").strip().split("\n")[-1] for path in self._folder.glob("*.log")]
                raise UsageError(f"The swarm did not come up: {' / '.join(logs)}")
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def swarm_on(folder: Path, base: Path, nodes: int = 0) -> Iterator[Swarm]:
    """A seed on `base`, and nodes (without engines) that hold it."""
    swarm = Swarm(folder)
    try:
        swarm.start("seed", "seed", "--base", str(base), "--listen", "127.0.0.1:0", "--preset", "loopback")
        swarm.until(lambda state: True)
        if nodes:
            ticket = swarm.ticket(nodes)
            for number in range(nodes):
                words = ("join", ticket, "--engine", "none", "--listen", "127.0.0.1:0", "--model", str(base))
                swarm.start(f"node{number}", *words)
            swarm.until(lambda state: [node["held"] for node in state["nodes"]] == [[0, 0]] * nodes)
        yield swarm
    finally:
        swarm.stop()
