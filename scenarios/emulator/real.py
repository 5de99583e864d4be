"""A real swarm on the emulated network: the product's own commands, one process and host each for seed and nodes.

The payload is a file of random bytes (`publish --raw`), so its size F can be chosen and every byte is sent. Times come
from the processes' own logs, which share this machine's clock.
"""

import contextlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from codec.errors import UsageError
from node.status.query import ask
from node.status.schema import OwnStatus, SeedStatus, Step
from scenarios.emulator.network import Host, Network
from scenarios.emulator.network.network import Firewall
from swarm.transport.base import Unreachable

__all__ = ["QUEUE_MS", "Node", "Outcome", "RealSwarm", "bound_s", "distribute", "processor_s", "spent_s"]

PORT: Final = 4001
PATIENCE_S: Final = 90.0
"""Upper bound for a process to start together with many others on two cores."""
FRAME_SHARE: Final = 52 / 9000
"""Share of IP and TCP headers (with timestamps) at MTU 9000; the bound includes it."""
DOWN_MBIT: Final = 1000.0
WARM_UPS: Final = 2
"""Versions that are not measured: the first proves the members, and the second uses the new connections of the trees
that are planned then."""
QUEUE_MS: Final = 50.0
"""Queue of every link, as in routers at home and in data centres. The emulator's default, one bandwidth-delay product,
would be 0 where the round trip is 0."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine of a case. A node behind a `firewall` does not announce that; the swarm has to find out."""

    up_mbit: float
    down_mbit: float = DOWN_MBIT
    region: str = ""
    firewall: Firewall = "none"


def bound_s(payload_bytes: int, seed_up_mbit: float, nodes: Sequence[Node]) -> float:
    """Return the least time in seconds in which all nodes can have F, headers included.

    That is max(F/u_s, F/d_min, N F/(u_s + sum u_i)): Kumar and Ross, "Peer-assisted file distribution: the minimum
    distribution time", 2006.
    """
    bits = 8 * payload_bytes * (1 + FRAME_SHARE)
    up = seed_up_mbit + sum(node.up_mbit for node in nodes)
    slowest = min(node.down_mbit for node in nodes)
    return max(bits / seed_up_mbit, bits / slowest, len(nodes) * bits / up) / 1e6


@dataclass(slots=True)
class Outcome:
    """How one version was distributed. Times are seconds since its publish began.

    `had_s`: by node, when it had verified and stored the whole version. `sent_bytes`: sent at the trainer's sockets
    until then; `control_bytes`: the part of them that is not payload. `duplicates`: payload bytes that nodes received
    more than once, over all payload bytes that they needed.
    """

    payload_bytes: int
    bound_s: float
    had_s: dict[str, float]
    sent_bytes: int
    control_bytes: int
    duplicates: float
    crossings: dict[str, float] = field(default_factory=dict)
    """By region: copies of F that entered it from other regions, headers and control included. Empty with one."""
    uplink_copies: float = 0.0
    """Bytes past the trainer's emulated uplink over F, headers and control included."""
    busy: float = 0.0
    """Share of this machine's CPU time in use meanwhile. Near 1 the result measures the machine, not the swarm."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """CPU seconds from the start of the publish to the last holder: of the seed, of each node that survived, and of the
    `wire` that carries their packets. The publishing process is not included."""

    @property
    def to_all_s(self) -> float:
        return max(self.had_s.values())

    @property
    def ratio(self) -> float:
        return self.to_all_s / self.bound_s

    @property
    def copies(self) -> float:
        return self.sent_bytes / self.payload_bytes


class RealSwarm:
    """The processes of one swarm. Start one with `RealSwarm.running`."""

    def __init__(
        self, folder: Path, raw_mb: int, network: Network, hosts: dict[str, Host], nodes: dict[str, Node]
    ) -> None:
        self.folder, self.hosts, self.nodes = folder, hosts, nodes
        self._network = network
        self._raw_mb = raw_mb
        self._content = b""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ticket = ""
        self._files = 0

    @classmethod
    @contextlib.contextmanager
    def running(
        cls,
        network: Network,
        seed: Node,
        nodes: Sequence[Node],
        raw_mb: int,
        *,
        late: int = 0,
        seed_flags: Sequence[str] = (),
    ) -> "Iterator[RealSwarm]":
        """Start a swarm, and end all its processes with the context.

        The last `late` nodes get a host but start only with `join`. `seed_flags`: flags of `swarm-node seed` beside
        those that the network determines. Raises `UsageError` when a process does not start.
        """
        hosts: dict[str, Host] = {}
        named = {f"node{i}": node for i, node in enumerate(nodes)}
        for name, node in {"seed": seed, **named}.items():
            hosts[name] = network.host(
                name, up_mbit=node.up_mbit, down_mbit=node.down_mbit, region=node.region, firewall=node.firewall,
                queue_ms=QUEUE_MS,
            )  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="swarm-real-") as folder, network:
            swarm = cls(Path(folder), raw_mb, network, hosts, {"seed": seed, **named})
            swarm._start_seed(seed_flags)
            for name in list(named)[: len(named) - late]:
                swarm.join(name)
            swarm.settle()
            yield swarm

    def join(self, name: str) -> None:
        """Start the node `name`."""
        node = self.nodes[name]
        listen = () if node.firewall != "none" else ("--announce", f"{self.hosts[name].address}:{PORT}")
        self._start(name, "relay", self._ticket, *listen)

    def publish(self, payload_bytes: int, *, at_half: Callable[["RealSwarm"], None] | None = None) -> Outcome:
        """Publish `payload_bytes` new random bytes and wait until every running node has them.

        If the last file was longer, only its head changes. `at_half` is called when half of the bound has passed.
        Raises `UsageError` when a node does not receive them.
        """
        members = [name for name in self.processes if name != "seed"]
        duplicates = {name: self._own_status(name).duplicate_bytes for name in members}
        self._files += 1
        version = f"0.{self._files}"
        file = self.folder / "file"
        fresh = secrets.token_bytes(payload_bytes - payload_bytes // 200)  # leaves room: F includes chunk headers
        self._content = fresh + self._content[len(fresh) :]
        file.write_bytes(self._content)
        command = self._command("publish", str(file), "--raw", "--json")
        bound = bound_s(payload_bytes, self.nodes["seed"].up_mbit, [self.nodes[name] for name in members])
        entered, spent, before_s = self._network.entered(), processor_s(), self._spent_s(self.processes)
        uplink = self.hosts["seed"].sums.sent_bytes
        with (self.folder / "publish.log").open("wb") as log:
            publishing = self.hosts["seed"].popen(command, env=self._environment("seed"), stdout=log, stderr=log)
        began = self._wait_for("seed", "publishing", version)
        if at_half is not None:
            time.sleep(max(0.0, began + bound / 2 - time.time()))
            at_half(self)
        lived = [name for name in members if self.processes[name].poll() is None and name not in self._stopped]
        had_s = {name: self._wait_for(name, "complete", version) - began for name in lived}
        uplinked = self.hosts["seed"].sums.sent_bytes - uplink
        spent_by = {name: now_s - before_s[name] for name, now_s in self._spent_s(["seed", *lived]).items()}
        used, idle = (after - before for before, after in zip(spent, processor_s(), strict=True))
        if publishing.wait(PATIENCE_S) != 0:
            raise UsageError(f"publish failed: {(self.folder / 'publish.log').read_text()[-500:]}")
        step = self._step(version)
        again = sum(self._own_status(name).duplicate_bytes - duplicates[name] for name in lived)
        return Outcome(
            payload_bytes=step.delta_bytes,
            bound_s=bound_s(step.delta_bytes, self.nodes["seed"].up_mbit, [self.nodes[name] for name in members]),
            had_s=had_s,
            sent_bytes=step.trainer_sent_bytes,
            control_bytes=step.trainer_control_bytes,
            duplicates=again / (step.delta_bytes * len(lived)),
            crossings={
                region: (now - entered[region]) / step.delta_bytes
                for region, now in self._network.entered().items()
                if len(entered) > 1
            },
            uplink_copies=uplinked / step.delta_bytes,
            busy=used / (used + idle),
            spent_s=spent_by,
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal that stops or kills to a node's process. Nothing waits for the node afterwards."""
        self._stopped.add(name)
        os.kill(self.processes[name].pid, number)

    def interior(self) -> str:
        """Return the node with the most children over all stripes: the one whose loss hurts most."""
        status = self._seed_status()
        slots = {node.slot: node.name for node in status.nodes}
        counts = dict.fromkeys(slots.values(), 0)
        for row in status.stripes:
            for parent in row.values():
                if parent in slots:
                    counts[slots[parent]] += 1
        return max(counts, key=lambda name: (counts[name], name))

    def settle(self) -> None:
        """Wait until every started node is a member, holds the head, and is placed in every planned tree."""
        running = [name for name in self.processes if name != "seed" and name not in self._stopped]

        def settled() -> bool:
            status = self._seed_status()
            held = [node.held for node in status.nodes if node.standing == "fresh"]
            placed = [set(row) for row in status.stripes]
            slots = {node.slot for node in status.nodes}
            return held.count(status.head) >= len(running) and bool(placed) and all(slots <= row for row in placed)

        self._until(settled, "the nodes did not all join")

    # ------------------------------------------------------------ internals

    def _spent_s(self, names: Iterable[str]) -> dict[str, float]:
        return {name: spent_s(self.processes[name].pid) for name in names} | {"wire": spent_s(self._network.wire_pid)}

    @property
    def _stopped(self) -> set[str]:
        return self.__dict__.setdefault("_gone", set())

    def _start_seed(self, flags: Sequence[str]) -> None:
        words = ("--raw-mb", str(self._raw_mb), "--announce", f"{self.hosts['seed'].address}:{PORT}", *flags)
        self._start("seed", "seed", *words)
        self._until(lambda: bool(self._seed_status().swarm), "the seed did not start")
        invite = self.hosts["seed"].run(
            self._command("invite", "--json", "--nodes", "1000"), env=self._environment("seed"), capture_output=True
        )
        if invite.returncode:
            raise UsageError(f"no ticket: {invite.stderr.decode()[-300:]}")
        self._ticket = json.loads(invite.stdout)["ticket"]

    def _start(self, name: str, *words: str) -> None:
        node = self.nodes[name]
        flags = ["--listen", f"0.0.0.0:{PORT}", "--name", name, "--region", node.region]
        flags += ["--up-mbit", str(node.up_mbit), "--down-mbit", str(node.down_mbit)]
        (self.folder / name).mkdir(exist_ok=True)
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = self.hosts[name].popen(
                self._command(*words, *flags), env=self._environment(name), stdout=log, stderr=log
            )

    @staticmethod
    def _command(*words: str) -> list[str]:
        return [sys.executable, "-m", "node.cli", *words]

    def _environment(self, name: str) -> dict[str, str]:
        return {**os.environ, "SWARM_HOME": str(self.folder / name), "NUMBA_NUM_THREADS": "1", "SWARM_LOG": "info"}

    def _seed_status(self) -> SeedStatus:
        """Return the seed's status; an empty one while the seed does not answer."""
        try:
            status = ask(self.folder / "seed")
        except Unreachable:
            return SeedStatus()
        assert isinstance(status, SeedStatus)
        return status

    def _own_status(self, name: str) -> OwnStatus:
        """Return the status of the node or relay `name`. Raises `Unreachable`."""
        status = ask(self.folder / name)
        assert not isinstance(status, SeedStatus)
        return status.nodes[0]

    def _step(self, version: str) -> Step:
        """Return the seed's report of a version, once its last holder has reported."""
        number = int(version.rpartition(".")[2])

        def steps() -> list[Step]:
            return [step for step in self._seed_status().steps if step.version[1] == number]

        self._until(lambda: bool(steps()), "the seed did not report the version")
        deadline = time.monotonic() + 10.0  # a stopped node never reports, so do not wait for it forever
        while steps()[0].publish_to_all_s is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return steps()[0]

    def _wait_for(self, name: str, event: str, version: str) -> float:
        """Wait until a process has logged `event` of `version`; return when, in seconds since the epoch."""
        found: list[float] = []

        def there() -> bool:
            for line in (self.folder / f"{name}.log").read_text(errors="replace").splitlines():
                if f'"{event}"' not in line or version not in line:
                    continue
                entry = json.loads(line)
                if entry.get("event") == event and entry.get("version") == version:
                    found.append(datetime.fromisoformat(entry["timestamp"].replace("Z", "+00:00")).timestamp())
                    return True
            return False

        self._until(there, f"{name} did not log {event} of {version}")
        return found[0]

    def _until(self, condition: Callable[[], bool], failure: str) -> None:
        """Wait until `condition` holds. Raises `UsageError` with `failure` on timeout, or when a process ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for name, process in self.processes.items():
                if process.poll() is not None and name not in self._stopped:
                    raise UsageError(f"{name} ended with {process.returncode}: {self._log_tail(name)}")
            if time.monotonic() > deadline:
                raise UsageError(f"{failure} within {PATIENCE_S:.0f} s")
            time.sleep(0.05)

    def _log_tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-800:]


def spent_s(pid: int) -> float:
    """Return the CPU seconds (user and system) of a process so far, with all its threads, ended ones too.

    0 when there is no such process.
    """
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def processor_s() -> tuple[float, float]:
    """Return the CPU seconds of all cores of this machine so far: (used, idle)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / hertz, idle / hertz


def distribute(
    seed: Node,
    nodes: Sequence[Node],
    sizes: Sequence[int],
    *,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    rtt_ms: float = 0.0,
    between_ms: float | None = None,
    late: int = 0,
    at_half: Callable[[RealSwarm], None] | None = None,
    rest_s: float = 3.0,
) -> list[Outcome]:
    """Publish files of `sizes` bytes one after the other, after `WARM_UPS` versions that do not count.

    Returns one outcome per size. `at_half` is called during the last publish, and `on_outcome` with each outcome that
    counts as soon as its publish ends. Raises `UsageError` when a publish fails.
    """
    network = Network(rtt_ms=rtt_ms, between_ms=between_ms)
    raw_mb = max(sizes) // 10**6 + 2
    found = []
    with RealSwarm.running(network, seed, nodes, raw_mb, late=late) as swarm:
        for number, size in enumerate([sizes[0]] * WARM_UPS + list(sizes), 1):
            swarm.settle()
            time.sleep(rest_s)
            last = number == WARM_UPS + len(sizes)
            outcome = swarm.publish(size, at_half=at_half if last else None)
            if number > WARM_UPS:
                found.append(outcome)
                on_outcome(outcome)
    return found


def main() -> None:
    """Run one case by hand: arguments are the number of nodes and the payload in MiB."""
    outcomes = distribute(Node(200), [Node(200)] * int(sys.argv[1]), [int(sys.argv[2]) << 20])
    for outcome in outcomes:
        times = statistics.quantiles(outcome.had_s.values(), n=4)
        print(f"{outcome.ratio:.3f} B = {outcome.to_all_s:.2f} s, copies {outcome.copies:.3f}, quartiles {times}")


if __name__ == "__main__":
    main()
