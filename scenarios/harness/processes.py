"""A seed and nodes as real processes on loopback, for scenarios of the trainer and of the ledger.

`swarm_on` starts them and kills them when its block ends.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from codec.errors import UsageError
from node.status import query
from node.status.schema import OwnStatus, SeedStatus
from node.trainers.connection.seedlink import ask_state
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["Swarm", "swarm_on"]

STARTED_WITHIN_S = 180.0
"""Seconds to wait for a condition of the seed's status. It is long because several engines may import torch on two
cores, and the first use of a kernel compiles it."""


class Swarm:
    """Processes of one swarm, by name. `home` is the home folder of the seed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.home = folder / "seed"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str, module: str = "node.cli", **environment: str) -> Path:
        """Start `swarm-node WORDS` (or another `module`) as process `name`, and return its home folder.

        `environment` is added to the environment variables of this process.
        """
        home = self._folder / name
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *words, "--home", str(home)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
            )
        return home

    def nodes(self, names: Sequence[str], base: Path, *words: str, **options: str) -> None:
        """Start nodes that generate rollouts, and wait until the seed reports an engine at each of them.

        `base` is the folder of the model, `words` are more arguments of `join`, and `options` go to `start`.
        """
        ticket = self.ticket(len(names))
        for name in names:
            join = ("join", ticket, "--model", str(base), "--listen", "127.0.0.1:0", "--name", name, *words)
            self.start(name, *join, **options)
        self.until(lambda status: set(names) <= {node.name for node in status.nodes if node.engine})

    def status(self) -> SeedStatus:
        return ask_state(self.home).swarm

    def node(self, name: str, *, prove: bool = False) -> OwnStatus:
        """The status of a node. With `prove`, it includes `live_root`, the root of the weights in its engine."""
        status = query.ask(self._folder / name, prove=prove)
        assert not isinstance(status, SeedStatus)
        return status.nodes[0]

    def signal(self, name: str, number: int) -> None:
        """Send signal `number` to the processes of a node, its engine included."""
        if number == signal.SIGKILL:
            process = self._processes.pop(name)
            _end(process)
        else:
            os.killpg(self._processes[name].pid, number)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def end(self, name: str, number: int) -> None:
        """Send signal `number` to a process, and wait until it has ended."""
        process = self._processes.pop(name)
        process.send_signal(number)
        process.wait()

    def publish(self, folder: Path) -> None:
        """Publish a checkpoint, and wait until every node holds it."""
        words = ["publish", str(folder), "--wait", "--json", "--home", str(self.home)]
        subprocess.run([sys.executable, "-m", "node.cli", *words], stdout=subprocess.DEVNULL, check=True)

    def ticket(self, nodes: int) -> str:
        words = ["invite", "--nodes", str(nodes), "--json", "--home", str(self.home)]
        ended = subprocess.run([sys.executable, "-m", "node.cli", *words], capture_output=True, check=True)
        return json.loads(ended.stdout)["ticket"]

    def until(self, condition: Callable[[SeedStatus], bool]) -> None:
        """Wait until the status of the seed meets `condition`.

        Raises `UsageError` with the last line of each log after `STARTED_WITHIN_S`, or as soon as a process has ended.
        """
        deadline = time.monotonic() + STARTED_WITHIN_S
        while True:
            with contextlib.suppress(SwarmDown, SwarmTimeout):
                if condition(ask_state(self.home).swarm):
                    return
            if time.monotonic() > deadline or any(process.poll() is not None for process in self._processes.values()):
                logs = [path.read_text(errors="replace").strip().split("\n")[-1] for path in self._folder.glob("*.log")]
                raise UsageError(f"The swarm did not come up: {' / '.join(logs)}")
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self._processes.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def swarm_on(folder: Path, base: Path, nodes: int = 0, seed_words: Sequence[str] = ()) -> Iterator[Swarm]:
    """Start a seed with model `base` and `nodes` nodes without engines, and wait until the nodes hold that model.

    `seed_words` are more flags for the seed. All processes are killed when the block ends.
    """
    swarm = Swarm(folder)
    try:
        swarm.start("seed", "seed", "--base", str(base), "--listen", "127.0.0.1:0", "--preset", "loopback", *seed_words)
        swarm.until(lambda status: True)
        if nodes:
            ticket = swarm.ticket(nodes)
            for number in range(nodes):
                words = ("join", ticket, "--engine", "none", "--listen", "127.0.0.1:0", "--model", str(base))
                swarm.start(f"node{number}", *words)
            swarm.until(lambda status: [node.held for node in status.nodes] == [(0, 0)] * nodes)
        yield swarm
    finally:
        swarm.stop()
