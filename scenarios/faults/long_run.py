"""A seed, a trainer and nodes as real processes on this machine, which are killed and started again.

The trainer publishes the steps of a `SmallModel` and takes rollouts all the time; some nodes have engines. Whoever is
killed is started again with its home, by the same command.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any, Final, Literal, TypeVar

from node.host.port import free_port
from node.status.schema import OwnStatus
from scenarios.faults.counting import Counting
from scenarios.faults.small_model import SmallModel
from scenarios.harness.processes import ProcessFailed
from scenarios.harness.swarm import NODE, Swarm, swarm_in
from swarm.transport.base import Unreachable

__all__ = ["Actor", "LongRun", "Member", "long_run"]

WITHIN_S: Final = 90.0
"""Time limit of each wait: the machine may be shared."""
FIRST_WITHIN_S: Final = 300.0
"""Of the first version: the first use of the coder on a machine compiles it."""
GONE_WITHIN_S: Final = 20.0
"""For the children of a killed process to end by themselves."""
BAD_WORDS: Final = ("Traceback", "This is a bug", '"equivocation"')
"""What no log may have."""

Kind = Literal["seed", "trainer", "node", "engine", "worker"]
MODULES: Final = {"engine": "node.engines.worker", "worker": "node.rewards.worker"}
"""What the children of a node run."""

Found = TypeVar("Found")


@dataclass(frozen=True)
class Actor:
    """A process that can be killed. `of`: the name of the process that it is, or whose child it is."""

    kind: Kind
    of: str

    def __str__(self) -> str:
        return self.of if self.kind in ("seed", "trainer", "node") else f"{self.of}'s {self.kind}"


@dataclass(frozen=True)
class Member:
    """A node. `replica`: where it keeps its copy. `engine`: whether it has an engine."""

    name: str
    replica: str = "ram"
    engine: bool = False


class LongRun:
    """Made by `long_run`, with all processes running."""

    def __init__(self, swarm: Swarm, model: SmallModel, members: Sequence[Member], up_mbit: float) -> None:
        self.swarm, self.model = swarm, model
        self.members = {member.name: member for member in members}
        self.up = set(self.members)
        """The members that should run."""
        self._up_mbit = str(up_mbit)
        self._port = free_port()
        self._may_fail = False
        self._read: dict[str, int] = {}
        """How much of each log was looked at."""
        self.counting = Counting(swarm.folder / "journal.jsonl", swarm.home())
        self._start_seed()
        swarm.wait("the seed serves", swarm.status, WITHIN_S)
        self._ticket = swarm.ticket("--nodes", str(len(self.members)))
        for name in self.members:
            self.start(Actor("node", name))
        self.start(Actor("trainer", "trainer"))
        self.until("all have joined", self.all_hold)
        self.publish()
        self.until("all hold the first version", self.all_hold, FIRST_WITHIN_S)
        self.until("rollouts come", lambda: self.counting.groups)

    # ------------------------------------------------------------ processes

    @property
    def actors(self) -> list[Actor]:
        """Everything that can be killed."""
        nodes = [Actor("node", name) for name in self.members]
        children = [Actor(kind, m.name) for m in self.members.values() if m.engine for kind in ("engine", "worker")]
        return [Actor("seed", "seed"), Actor("trainer", "trainer"), *nodes, *children]

    def pid(self, actor: Actor) -> int | None:
        """The id of the actor's process; None: there is none at the moment."""
        if actor.kind not in MODULES:
            return self.swarm.pid(actor.of) if actor.of in self.swarm.running else None
        found = [pid for pid in _children(self.swarm.pid(actor.of)) if MODULES[actor.kind] in _command(pid)]
        return found[0] if found else None

    def runs(self, name: str) -> bool:
        """Whether the process of this name runs; False also if it has ended by itself."""
        return name in self.swarm.running and self.swarm.running[name].poll() is None

    def kill(self, actor: Actor) -> bool:
        """SIGKILL the process alone, not its group; whether there was one. What it leaves must end by itself."""
        pid = self.pid(actor)
        if pid is None:
            return False
        left = list(_children(pid))
        if actor.kind in MODULES:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            left.append(pid)  # it is there until its node knows, which says until then that the engine is well
        else:
            self.swarm.signal(actor.of, signal.SIGKILL)
        goal = f"{actor} and its children end"
        self.swarm.wait(goal, lambda: not any(Path(f"/proc/{child}").exists() for child in left), GONE_WITHIN_S, of=())
        return True

    def stop(self, name: str) -> None:
        """Have a node leave the swarm (SIGTERM). The signal itself ends one that has only just begun to start."""
        self.up.discard(name)
        code = self.swarm.signal(name, signal.SIGTERM)
        if code not in (143, -signal.SIGTERM):
            raise ProcessFailed(f"{name} ended with {code} after SIGTERM.\n{self.swarm.log(name)}")

    def start(self, actor: Actor) -> None:
        """Start a seed, node or trainer (again). Engines and workers are started again by their nodes."""
        if actor.kind == "seed":
            self._start_seed()
        elif actor.kind == "node":
            self.up.add(actor.of)
            self._start_node(self.members[actor.of])
        elif actor.kind == "trainer":
            words = ("--home", str(self.swarm.home()), "--journal", str(self.swarm.folder / "journal.jsonl"))
            command = [sys.executable, "-m", "scenarios.faults.trainer", *words]
            self.swarm.start_command("trainer", command, stdin=PIPE)

    def _start_seed(self) -> None:
        words = ("--base", str(self.model.base), "--listen", f"127.0.0.1:{self._port}", "--preset", "loopback")
        self.swarm.start("seed", "seed", *words, "--up-mbit", self._up_mbit)

    def _start_node(self, member: Member) -> None:
        words = ("--model", str(self.model.base), "--name", member.name, "--replica", member.replica)
        if member.engine:
            options = {"module": "scenarios.faults.small_node"}
            self.swarm.start(member.name, "join", self._ticket, *words, "--up-mbit", self._up_mbit, **options)
        else:
            self.swarm.start(member.name, "join", self._ticket, *NODE, *words, "--up-mbit", self._up_mbit)

    # ------------------------------------------------------------ versions and rollouts

    def publish(self, *, may_fail: bool = False) -> None:
        """Have the trainer publish the next step; returns at once. `may_fail`: that it is refused is no failure."""
        self.model.next_step()
        self._may_fail = may_fail
        self._ask()

    def answer(self) -> dict[str, Any] | None:
        """What the trainer said of the newest step; None: nothing yet."""
        return self.counting.answers.get(self.model.step)

    def publish_again(self, *, may_fail: bool = False) -> None:
        """Have the trainer publish the newest step again, unless that is the head already. `may_fail`: as `publish`."""
        self._may_fail = may_fail
        if not self.is_head():
            self._ask()

    def is_head(self) -> bool:
        """Whether the seed has sealed the newest step."""
        return self.swarm.seed_status().root == self.model.root

    def all_hold(self) -> bool:
        """Whether the seed and all members that should run hold the newest step, and their engines generate with it."""
        head = self.swarm.seed_status()
        if head.root != self.model.root:
            return False
        return all(self.holds(name) for name in self.up)

    def holds(self, name: str) -> bool:
        """Whether this member holds the newest step, and generates with it if it has an engine."""
        own = self._own(name)
        if own is None or own.root != self.model.root or own.phase != "idle":
            return False
        return not self.members[name].engine or own.engine == own.held

    def replica_holds(self, name: str) -> bool:
        """Whether this member's replica is the newest step."""
        own = self._own(name)
        return own is not None and own.root == self.model.root

    def prove(self) -> None:
        """Have every engine's bits read back. Raises `ProcessFailed` for one that has others than the newest step's."""
        for name in self.up:
            if not self.members[name].engine:
                continue
            own = self.swarm.own_status(name, prove=True)
            if own.live_root != self.model.root or own.live_proven is not True:
                raise ProcessFailed(f"{name}'s engine has the root {own.live_root} instead of {self.model.root}")

    def until(self, goal: str, condition: Callable[[], Found], within_s: float = WITHIN_S) -> Found:
        """Wait as `Processes.wait`, and read the trainer's journal and the logs meanwhile."""

        def met() -> Found:
            self.look()
            return condition()

        try:
            watched = [name for name in ("seed", "trainer", *self.up) if name in self.swarm.running]
            return self.swarm.wait(goal, met, within_s, of=[] if self._may_fail else watched)
        except ProcessFailed as error:
            raise ProcessFailed(f"{error}\n{self.standing()}") from None

    def look(self) -> None:
        """Read what the trainer was handed and what all logs say since the last look; raises what is wrong."""
        self.counting.read()
        answer = self.answer()
        if answer is not None and "failed" in answer and not self._may_fail:
            raise ProcessFailed(f"step {self.model.step} was not published: {answer['why']}\n{self.swarm.logs()}")
        for path in self.swarm.folder.glob("*.log"):
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                new = file.read()
            self._read[path.name] = self._read.get(path.name, 0) + len(new)
            for word in BAD_WORDS:
                if word.encode() in new:
                    raise ProcessFailed(f"{path.name} has {word!r}:\n{new.decode(errors='replace')[-4000:]}")

    def standing(self) -> str:
        """Who holds what, for people."""
        seed = self.swarm.seed_status()
        lines = [f"wanted: step {self.model.step}, root {self.model.root[:16]}; seed: {seed.head} {seed.root[:16]}"]
        for name in sorted(self.up):
            own = self._own(name)
            lines.append(
                f"{name}: does not answer" if own is None else
                f"{name}: {own.standing} {own.held} {(own.root or '')[:16]} {own.phase} engine {own.engine}"
            )  # fmt: skip
        return "\n".join(lines)

    def _own(self, name: str) -> OwnStatus | None:
        with contextlib.suppress(Unreachable):
            return self.swarm.own_status(name)
        return None

    def _ask(self) -> None:
        self.counting.answers.pop(self.model.step, None)
        stdin = self.swarm.running["trainer"].stdin
        assert stdin is not None
        folder = self.model.folder_of(self.model.step)
        stdin.write(f"publish {self.model.step} {folder}\n".encode())
        stdin.flush()


@contextlib.contextmanager
def long_run(folder: Path, members: Sequence[Member], *, seed: int, up_mbit: float, **model: Any) -> Iterator[LongRun]:
    """A long run in `folder`. `seed`: of the model's bits. `up_mbit`: of each process. `model`: as of `SmallModel`."""
    folder.mkdir(parents=True, exist_ok=True)
    with swarm_in(folder / "swarm", patience_s=WITHIN_S) as swarm:
        yield LongRun(swarm, SmallModel(folder, seed=seed, **model), members, up_mbit)


def _children(pid: int) -> Iterator[int]:
    """The processes that a process has started, and theirs."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _children(child)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
