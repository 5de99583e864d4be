"""A whole swarm on one machine, each part in its own process: `swarm-node demo`.

    trainer (torch) <--trainer.sock--> seed <--libp2p--> node 1..N (each with its own engine process)

The processes are real: one node is killed with SIGKILL while it has work (step 3), and another joins without a model
(step 4). At the end the bits of every replica and of every engine's live parameters are compared with the trainer's.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from codec.errors import SwarmError
from node.host import kernels
from node.host.child import child_environment, python_module
from node.host.last_line import last_line
from node.settings import logs
from node.settings.config import DemoConfig
from node.settings.contact import Contact
from node.status import query
from node.status.keys import pressed_keys
from node.status.progress import ProgressLine
from node.status.schema import EngineCommit, OwnStatus, SeedStatus, Step, to_plain
from node.status.terminal import Picture, watch
from swarm.transport.base import Unreachable

__all__ = ["render", "run"]

KILL_AT: Final = 3
JOIN_AT: Final = 4
START_WITHIN_S: Final = 120.0
VLLM_STARTS_WITHIN_S: Final = 600.0
"""One vLLM takes half a minute on its own machine; here several may share two cores."""
STEP_WITHIN_S: Final = 180.0
SETTLE_WITHIN_S: Final = 60.0
STOP_WITHIN_S: Final = 10.0


class DemoFailed(SwarmError):
    """The demo failed. The text says what happened, and how to get the logs."""


async def run(config: DemoConfig, *, live: bool) -> dict[str, Any]:
    """Run the demo. Returns the report that `--json` prints. Raises `DemoFailed`. Never leaves a process behind."""
    logs.configure("warning")
    folder = Path(tempfile.mkdtemp(prefix="swarm-demo-")) if config.keep is None else config.keep / "run"
    folder.mkdir(exist_ok=True, mode=0o700)
    demo = _Demo(config, folder)
    try:
        async with trio.open_nursery() as nursery:
            try:
                with ProgressLine("Starting") as progress:
                    await demo.start(nursery, progress)
                if live:
                    nursery.start_soon(partial(watch, demo.view))
                    nursery.start_soon(demo.watch_keys)
                await demo.train(quiet=live)
                return await demo.compare()
            finally:
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise _reason(group) from group
    finally:
        with trio.CancelScope(shield=True):
            await demo.stop()
        if config.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _reason(group: BaseExceptionGroup) -> BaseException:
    """The error that is the cause; a nursery adds cancellations to it."""
    for error in group.exceptions:
        inner = _reason(error) if isinstance(error, BaseExceptionGroup) else error
        if not isinstance(inner, trio.Cancelled):
            return inner
    return group


@dataclass
class _Proc:
    """One child process, in its own process group."""

    name: str
    home: Path
    log: Path
    process: subprocess.Popen[bytes]
    killed: bool = False
    commits: list[EngineCommit] = field(default_factory=list)

    def alive(self) -> bool:
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_log_line(self) -> str:
        """The last line of its log, for an error text."""
        return last_line(self.log)[:300] or "it said nothing"


class _Demo:
    """The processes of the demo, and what they have reported."""

    def __init__(self, config: DemoConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.steps: list[dict[str, Any]] = []
        """Of the report: what the trainer tells of each step, and the seed's `Step`."""
        self._seen: list[Step] = []
        self._rewards: dict[tuple[int, int], float] = {}
        self.nodes: list[_Proc] = []
        self.seed: _Proc | None = None
        self.trainer: _Proc | None = None
        self.ticket = ""
        self.news = ""
        self.trainer_root = ""
        self.started = time.monotonic()

    @property
    def _engines_within_s(self) -> float:
        return VLLM_STARTS_WITHIN_S if self.config.engine == "vllm" else START_WITHIN_S

    # ------------------------------------------------------------ processes

    def _spawn(
        self, name: str, arguments: list[str], *, pipes: bool = False, threads: int = 1, **variables: str
    ) -> _Proc:
        home = self.folder / name
        log = self.folder / f"{name}.log"
        env = (
            child_environment()
            | {"SWARM_LOG": "info", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
            | variables
        )
        with log.open("ab") as output:
            process = subprocess.Popen(
                python_module(*arguments),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                env=env,
                start_new_session=True,
            )
        return _Proc(name, home, log, process)

    async def start(self, nursery: trio.Nursery, progress: ProgressLine) -> None:
        """Start trainer (which makes the base), seed and nodes. Returns when every node's engine holds version 0."""
        config = self.config
        self._events, events = trio.open_memory_channel[dict[str, Any]](64)
        self._trainer_events = events
        self.trainer = self._spawn(
            "trainer",
            ["node.trainers.grpo.online", "--home", str(self.folder / "seed"), "--size", config.model,
             "--steps", str(config.steps), "--seed", str(config.seed)],
            pipes=True,
        )  # fmt: skip
        nursery.start_soon(self._listen, self.trainer)
        async with trio.open_nursery() as meanwhile:  # otherwise every process would wait for the compiler later
            meanwhile.start_soon(kernels.warm_up)
            base = (await self._await_event("base", 600.0, progress))["folder"]
        progress.label = "Starting the seed"
        self.seed = self._spawn(
            "seed",
            ["node.cli", "seed", "--base", base, "--home", str(self.folder / "seed"), "--preset", "loopback",
             "--listen", "127.0.0.1:0", "--name", "trainer"],
        )  # fmt: skip
        await self._until(lambda: (self.folder / "seed" / "contact.json").exists(), START_WITHIN_S, "the seed starts")
        await self._until(lambda: bool(self._seed_status().swarm), START_WITHIN_S, "the seed answers")
        Contact.read(self.folder / "seed")
        self.ticket = await self._invite()
        progress.label = "Starting the nodes"
        for _ in range(config.nodes):
            self.add_node()
        await self._until(
            lambda: self._engines_at((0, 0)) == config.nodes, self._engines_within_s, "the nodes' engines start"
        )
        self._tell_trainer()

    async def _invite(self) -> str:
        done = await trio.run_process(
            python_module("node.cli", "invite", "--home", str(self.folder / "seed"), "--nodes", "1000", "--json"),
            capture_stdout=True,
            env=child_environment(),
        )
        return msgspec.json.decode(done.stdout)["ticket"]

    def add_node(self) -> _Proc:
        """Start one more node, without a model."""
        name = f"node{len(self.nodes) + 1}"
        vllm = ["--engine-port", "0"] if self.config.engine == "vllm" else []
        if vllm and self.config.vllm_python is not None:
            vllm += ["--vllm-python", str(self.config.vllm_python)]
        proc = self._spawn(
            name,
            ["node.cli", "join", "--engine", self.config.engine, "--home", str(self.folder / name),
             "--listen", "127.0.0.1:0", "--name", name, "--threads", "1", *vllm],
            SWARM_TICKET=self.ticket,
        )  # fmt: skip
        self.nodes.append(proc)
        return proc

    def kill_one(self) -> None:
        """Send SIGKILL to the living node with the most work; its engine ends with it."""
        busy = {node.name: node.outstanding for node in self._seed_status().nodes}
        alive = [n for n in self.nodes if n.alive() and not n.killed]
        if len(alive) < 2:
            return
        victim = max(alive, key=lambda n: (busy.get(n.name, 0), n.name))
        victim.killed = True
        victim.signal(signal.SIGKILL)
        self.news = f"{victim.name} was killed with {busy.get(victim.name, 0)} samples leased to it"

    async def stop(self) -> None:
        """End every process: with SIGTERM, then with SIGKILL."""
        procs = [p for p in [self.trainer, *self.nodes, self.seed] if p is not None]
        for proc in procs:
            if proc.alive():
                proc.signal(signal.SIGTERM)
        with trio.move_on_after(STOP_WITHIN_S):
            while any(p.alive() for p in procs):  # noqa: ASYNC110 - a Popen has no event for the end of its child
                await trio.sleep(0.05)
        for proc in procs:
            proc.signal(signal.SIGKILL)
            proc.process.wait()
            for pipe in (proc.process.stdin, proc.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    # ------------------------------------------------------------ what the processes report

    async def _listen(self, proc: _Proc) -> None:
        """Read the trainer's JSON lines as events."""
        assert proc.process.stdout is not None
        stream = trio.lowlevel.FdStream(os.dup(proc.process.stdout.fileno()))
        rest = b""
        async with stream, self._events:
            async for data in stream:
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    await self._events.send(msgspec.json.decode(line))

    async def _events_of_trainer(self, within_s: float) -> AsyncGenerator[dict[str, Any]]:
        while True:
            with trio.move_on_after(within_s) as scope:
                try:
                    event = await self._trainer_events.receive()
                except trio.EndOfChannel:
                    assert self.trainer is not None
                    raise DemoFailed(f"The trainer ended: {self.trainer.last_log_line()}{self._logs()}") from None
                yield event
            if scope.cancelled_caught:
                raise DemoFailed(f"The trainer reported nothing for {within_s:.0f} s.{self._logs()}")

    async def _await_event(self, name: str, within_s: float, progress: ProgressLine) -> dict[str, Any]:
        async with contextlib.aclosing(self._events_of_trainer(within_s)) as events:
            async for event in events:
                if event["event"] == name:
                    return event
                if event["event"] == "progress":
                    progress.label = event["line"]
        raise AssertionError("unreachable")

    def _tell_trainer(self) -> None:
        assert self.trainer is not None
        assert self.trainer.process.stdin is not None
        self.trainer.process.stdin.write(b"\n")
        self.trainer.process.stdin.flush()

    def _seed_status(self) -> SeedStatus:
        """An empty one while the seed does not answer."""
        try:
            status = query.ask(self.folder / "seed")
        except Unreachable:
            return SeedStatus()
        assert isinstance(status, SeedStatus)
        return status

    async def _prove(self, proc: _Proc) -> OwnStatus:
        """The node's status after its engine read back its bits; an empty one if it does not answer."""
        try:
            status = await trio.to_thread.run_sync(partial(query.ask, proc.home, prove=True))
        except Unreachable:
            return OwnStatus()
        assert not isinstance(status, SeedStatus)
        return status.nodes[0]

    def _engines_at(self, version: tuple[int, int]) -> int:
        return sum(node.engine == version for node in self._seed_status().nodes)

    async def _until(self, condition: Any, within_s: float, goal: str) -> None:
        deadline = trio.current_time() + within_s
        while not await trio.to_thread.run_sync(condition):
            for proc in [self.trainer, self.seed, *self.nodes]:
                if proc is not None and not proc.alive() and not proc.killed:
                    raise DemoFailed(f"{proc.name} ended: {proc.last_log_line()}{self._logs()}")
            if trio.current_time() > deadline:
                raise DemoFailed(f"Waited {within_s:.0f} s until {goal}.{self._logs()}")
            await trio.sleep(0.1)

    def _logs(self) -> str:
        return (
            f" The logs are in {self.folder}."
            if self.config.keep
            else " Run it again with --keep FOLDER to have the logs."
        )

    # ------------------------------------------------------------ training

    async def train(self, *, quiet: bool) -> None:
        """Follow the trainer through its steps, kill a node and add one."""
        async with contextlib.aclosing(self._events_of_trainer(STEP_WITHIN_S)) as events:
            async for event in events:
                match event.pop("event"):
                    case "begins":
                        await self._at_step(event["step"])
                    case "step":
                        await self._note_step(event)
                        if not quiet:
                            print(_line(self.steps[-1]), file=sys.stderr)
                    case "done":
                        self.trainer_root = event["root"]
                        return

    async def _at_step(self, step: int) -> None:
        if step == KILL_AT and self.config.steps >= KILL_AT:
            await self._until(
                lambda: any(node.outstanding for node in self._seed_status().nodes), 30.0, "a node has work"
            )
            self.kill_one()
        if step == JOIN_AT:
            self.add_node()
            self.news = f"{self.nodes[-1].name} joins from nothing"

    async def _note_step(self, event: dict[str, Any]) -> None:
        """Merge what the trainer and the seed report of one step."""
        status = await trio.to_thread.run_sync(self._seed_status)
        version = tuple(event["version"])
        known = next((step for step in status.steps if step.version == version), None)
        self._seen.append(known or Step(version=version))
        self._rewards[version] = event["reward"]
        self.steps.append(event | ({} if known is None else to_plain(known)) | {"version": version[1]})

    async def compare(self) -> dict[str, Any]:
        """Wait until every node is at the head, then compare all bits with the trainer's. Returns the report."""
        head = (0, self.config.steps)
        alive = [n for n in self.nodes if n.alive() and not n.killed]
        await self._until(
            lambda: self._engines_at(head) >= len(alive),
            max(SETTLE_WITHIN_S, self._engines_within_s - START_WITHIN_S),
            "every node holds the last step",
        )
        proofs = {n.name: await self._prove(n) for n in alive}
        for proc in alive:
            commits = proofs[proc.name].commits
            proc.commits = commits if isinstance(commits, list) else []
        for step, seen in zip(self.steps, self._seen, strict=True):
            pauses = [c.pause_ms for n in alive for c in n.commits if c.version == (0, step["version"])]
            step["commit_pause_ms"] = max(pauses, default=None)
            if pauses:
                seen.pause_s = max(pauses) / 1e3
        status = self._seed_status()
        self._tell_trainer()
        live_roots = {name: proof.live_root or None for name, proof in proofs.items()}
        return {
            "nodes": [
                {"name": n.name, "killed": n.killed, "root": proofs.get(n.name, OwnStatus()).root,
                 "engine_root": live_roots.get(n.name)}
                for n in self.nodes
            ],
            "trainer_root": self.trainer_root,
            "seed_root": status.root,
            "roots_equal": all(root == self.trainer_root for root in (status.root, *(p.root for p in proofs.values()))),
            "engines_equal": bool(proofs) and all(root == self.trainer_root for root in live_roots.values()),
            "rollouts_accepted": status.work.accepted,
            "rollouts_refused": sum(status.work.refused.values()),
            "refused": status.work.refused,
            "seconds": round(time.monotonic() - self.started, 1),
            "steps": self.steps,
        }  # fmt: skip

    # ------------------------------------------------------------ for people

    def view(self) -> Picture:
        """What the live view shows."""
        status = self._seed_status()
        status.steps = self._seen
        return Picture(status, message=self.news or "k: kill a node   ctrl-c: stop", rewards=self._rewards)

    async def watch_keys(self) -> None:
        """In the live view, the key k kills a node."""
        async for key in pressed_keys():
            if key == "k":
                self.kill_one()


def _line(step: dict[str, Any]) -> str:
    to_all = step.get("publish_to_all_s")
    return (
        f"step {step['step']}: reward {step['reward']:.3f}, density {step['density']:.2%}, "
        f"{step['bits_per_change']:.2f} bits a change, {step['delta_bytes'] / 1e3:.0f} kB"
        + (f", with every node after {to_all:.2f} s" if to_all is not None else "")
        + f", {step.get('trainer_copies', 0):.2f} copies sent"
    )


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    alive = [n for n in report["nodes"] if not n["killed"]]
    full = report["steps"][-1]["full_bytes"] if report["steps"] else 0
    sent = sum(s["delta_bytes"] for s in report["steps"])
    verdict = "equal" if report["roots_equal"] and report["engines_equal"] else "NOT EQUAL"
    return "\n".join([
        f"{len(report['steps'])} steps in {report['seconds']:.0f} s; {len(alive)} nodes at the end.",
        f"Rollouts: {report['rollouts_accepted']} accepted, {report['rollouts_refused']} refused.",
        f"Deltas: {sent / 1e3:.0f} kB in all, where full copies would be {full * len(report['steps']) / 1e6:.1f} MB.",
        f"Every replica's bits and every engine's are {verdict} to the trainer's ({report['trainer_root'][:16]}).",
    ])  # fmt: skip
