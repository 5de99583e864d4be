"""Swarms of real processes: a seed, nodes, and `swarm-node` commands, each with a home folder of its own."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from node.status.query import ask
from node.status.schema import OwnStatus, SeedStatus, Status, to_plain
from scenarios.harness.processes import PATIENCE_S, Processes, ProcessFailed, kill
from swarm.transport.base import Unreachable

__all__ = ["LOOPBACK", "NODE", "STARTED_WITHIN_S", "Ended", "State", "Swarm", "swarm_in", "swarm_on"]

LOOPBACK: Final = ("--listen", "127.0.0.1:0")
NODE: Final = ("--engine", "none", *LOOPBACK)
STARTED_WITHIN_S: Final = 180.0
"""Time limit for engines and large models to start, s: several may import torch on two cores, and the first use of a
kernel compiles it."""

State = dict[str, Any]
"""What `status --json` prints."""


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


class Swarm(Processes):
    """Processes of one swarm. The name of a process is that of its home; the seed's is `seed` by default."""

    def home(self, name: str = "seed") -> Path:
        return self.folder / name

    # ------------------------------------------------------------ commands

    def swarm_node(
        self, name: str, *words: str, prefix: Sequence[str] = (), module: str = "node.cli", **environment: str
    ) -> tuple[list[str], dict[str, str]]:
        """The command line and the variables of `swarm-node *words` in the home of `name`.

        `prefix`: the words of a command that starts it, `nsenter` for example. `module`: another one to run.
        """
        variables = {"SWARM_HOME": str(self.home(name))} | environment
        return [*prefix, sys.executable, "-m", module, *words], variables

    def start(self, name: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start `swarm-node *words` in the background; its output goes to its log. `options`: as of `swarm_node`."""
        command, environment = self.swarm_node(name, *words, **options)
        return self.start_command(name, command, environment=environment)

    def piped(self, name: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start `swarm-node *words` with pipes for its output. `options`: as of `swarm_node`."""
        command, environment = self.swarm_node(name, *words, **options)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return self.popen(name, command, environment=environment, **pipes)

    def command(self, name: str, *words: str, within_s: float | None = None, **options: Any) -> Ended:
        """Run `swarm-node *words` to its end. Raises `ProcessFailed` after `within_s`. `options`: of `swarm_node`."""
        within_s = self.patience_s if within_s is None else within_s
        began = time.monotonic()
        process = self.piped(name, *words, **options)
        try:
            out, err = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            kill(process)
            out, err = process.communicate()
            failure = f"{words} did not end in {within_s:.0f} s: {out.decode()} {err.decode()}"
            raise ProcessFailed(f"{failure}\n{self.logs()}") from None
        return Ended(process.returncode, out.decode(), err.decode(), time.monotonic() - began)

    def together(self, *commands: tuple[str, ...], within_s: float = PATIENCE_S) -> list[Ended]:
        """Run several commands (name, words...) concurrently and wait until all have ended."""
        with ThreadPoolExecutor(len(commands)) as pool:
            return list(pool.map(lambda command: self.command(*command, within_s=within_s), commands))

    def json(self, name: str, *words: str, **options: Any) -> Any:
        """The JSON output of a command. Raises `ProcessFailed` if it fails. `options`: as of `command`."""
        ended = self.command(name, *words, "--json", **options)
        if ended.code:
            raise ProcessFailed(f"{words}: {ended}\n{self.logs()}")
        return json.loads(ended.out)

    # ------------------------------------------------------------ seeds and nodes

    def seed(self, base: Path | None, *words: str, name: str = "seed", **options: Any) -> None:
        """Start a seed and wait until it serves. `base`: its model's folder; None if `words` say `--raw-mb`."""
        model = () if base is None else ("--base", str(base))
        listen = () if "--listen" in words else LOOPBACK
        preset = () if "--preset" in words else ("--preset", "loopback")
        self.start(name, "seed", *model, *listen, *preset, *words, **options)
        self.wait("it serves", lambda: self.status(name), of=[name])

    def ticket(self, *words: str, name: str = "seed") -> str:
        return self.json(name, "invite", *words)["ticket"]

    def publish(self, folder: Path, *words: str, name: str = "seed") -> State:
        return self.json(name, "publish", str(folder), *words)

    def node(self, name: str, ticket: str, *words: str, **options: Any) -> None:
        """Start a node without an engine."""
        self.start(name, "join", ticket, *NODE, *words, **options)

    def engines(self, names: Sequence[str], base: Path, *words: str, **options: Any) -> None:
        """Start nodes that generate rollouts, and wait until the seed reports an engine at each of them.

        `base` is the folder of the model, `words` are more arguments of `join`, and `options` go to `start`.
        """
        ticket = self.ticket("--nodes", str(len(names)))
        for name in names:
            join = ("join", ticket, "--model", str(base), *LOOPBACK, "--name", name, *words)
            self.start(name, *join, **options)
        self.until_seed("all engines run", lambda seed: set(names) <= {node.name for node in seed.nodes if node.engine})

    # ------------------------------------------------------------ status

    def status(self, name: str = "seed", *, prove: bool = False) -> Status | None:
        """The status of a process; None while it does not answer. `prove`: as of `status --prove`."""
        try:
            return ask(self.home(name), prove=prove)
        except Unreachable:
            return None

    def seed_status(self) -> SeedStatus:
        """The status of the seed; an empty one while it does not answer."""
        status = self.status()
        assert status is None or isinstance(status, SeedStatus)
        return status or SeedStatus()

    def own_status(self, name: str, *, prove: bool = False) -> OwnStatus:
        """The status of a node or relay. With `prove`, it includes `live_root`, the root of its engine's weights.

        Raises `Unreachable`.
        """
        status = ask(self.home(name), prove=prove)
        assert not isinstance(status, SeedStatus)
        return status.nodes[0]

    def state(self, name: str) -> State:
        """The output of `status --json`; empty while the process does not answer."""
        status = self.status(name)
        return {} if status is None else to_plain(status)

    def until(self, name: str, condition: Callable[[State], bool], within_s: float | None = None) -> State:
        """Wait until the state of the process `name` meets the condition; returns the state."""
        state: State = {}

        def met() -> bool:
            nonlocal state
            state = self.state(name)
            return bool(state) and condition(state)

        try:
            self.wait("its state is as expected", met, within_s, of=[name])
        except ProcessFailed as error:
            raise ProcessFailed(f"{name} is at {state}: {error}") from None
        return state

    def until_seed(self, goal: str, condition: Callable[[SeedStatus], bool]) -> None:
        """Wait until the seed answers and its status meets the condition, while all processes run."""

        def met() -> bool:
            status = self.seed_status()
            return bool(status.swarm) and condition(status)

        self.wait(goal, met, STARTED_WITHIN_S)

    def until_there(self, name: str, pattern: str) -> None:
        """Wait for a file that matches `pattern` in the home of `name`."""
        self.wait(f"{name} has {pattern}", lambda: any(self.home(name).glob(pattern)), of=())


@contextlib.contextmanager
def swarm_in(folder: Path, **options: Any) -> Iterator[Swarm]:
    """A swarm whose processes are all killed when the block ends. `options`: as of `Processes`.

    Raises `ProcessFailed` if a process outlived the leader of its group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(folder, **options)
    try:
        yield swarm
    finally:
        orphans = swarm.close()
    if orphans:
        raise ProcessFailed(f"process groups {orphans} outlived their leaders")


@contextlib.contextmanager
def swarm_on(folder: Path, base: Path, nodes: int = 0, seed_words: Sequence[str] = ()) -> Iterator[Swarm]:
    """A seed with model `base` and `nodes` nodes without engines, once the nodes hold that model.

    `seed_words` are more flags for the seed. All processes are killed when the block ends.
    """
    with swarm_in(folder, patience_s=STARTED_WITHIN_S) as swarm:
        swarm.seed(base, *seed_words)
        if nodes:
            ticket = swarm.ticket("--nodes", str(nodes))
            for number in range(nodes):
                swarm.node(f"node{number}", ticket, "--model", str(base))
            swarm.until_seed("all nodes hold the model", lambda seed: [n.held for n in seed.nodes] == [(0, 0)] * nodes)
        yield swarm
