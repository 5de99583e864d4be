"""A real swarm on the emulated network: the product's own commands, one process and host each for seed and nodes.

The payload is a file of random bytes (`publish --raw`), so its size F can be chosen and every byte is sent. Times come
from the processes' own logs, which share this machine's clock.
"""

import contextlib
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from node.status.schema import Step
from scenarios.emulator.network import Host, Network
from scenarios.emulator.network.network import Firewall
from scenarios.harness.processes import ProcessFailed
from scenarios.harness.swarm import Swarm
from scenarios.harness.usage import ProcessUsage, machine_cpu_s

__all__ = ["QUEUE_MS", "Node", "Outcome", "RealSwarm", "bound_s", "distribute"]

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


class RealSwarm(Swarm):
    """The processes of one swarm. Start one with `RealSwarm.started`."""

    def __init__(
        self, folder: Path, raw_mb: int, network: Network, hosts: dict[str, Host], nodes: dict[str, Node]
    ) -> None:
        super().__init__(folder, on=lambda name: hosts[name].popen, patience_s=PATIENCE_S)
        self.hosts, self.nodes = hosts, nodes
        self._network = network
        self._raw_mb = raw_mb
        self._content = b""
        self._ticket = ""
        self._files = 0

    @classmethod
    @contextlib.contextmanager
    def started(
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
        those that the network determines. Raises `ProcessFailed` when a process does not start.
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
            try:
                swarm._start_seed(seed_flags)
                for name in list(named)[: len(named) - late]:
                    swarm.join(name)
                swarm.settle()
                yield swarm
            finally:
                swarm.close()

    def join(self, name: str) -> None:
        """Start the node `name`."""
        node = self.nodes[name]
        listen = () if node.firewall != "none" else ("--announce", f"{self.hosts[name].address}:{PORT}")
        self._start(name, "relay", self._ticket, *listen)

    def send(self, payload_bytes: int, *, at_half: Callable[["RealSwarm"], None] | None = None) -> Outcome:
        """Publish `payload_bytes` new random bytes and wait until every running node has them.

        If the last file was longer, only its head changes. `at_half` is called when half of the bound has passed.
        Raises `ProcessFailed` when a node does not receive them.
        """
        members = self._members()
        duplicates = {name: self.own_status(name).duplicate_bytes for name in members}
        self._files += 1
        version = f"0.{self._files}"
        file = self.folder / "file"
        fresh = secrets.token_bytes(payload_bytes - payload_bytes // 200)  # leaves room: F includes chunk headers
        self._content = fresh + self._content[len(fresh) :]
        file.write_bytes(self._content)
        bound = bound_s(payload_bytes, self.nodes["seed"].up_mbit, [self.nodes[name] for name in members])
        entered, spent, before_s = self._network.entered(), machine_cpu_s(), self._spent_s(["seed", *members])
        uplink = self.hosts["seed"].sums.sent_bytes
        publishing = self.piped("seed", "publish", str(file), "--raw", "--json")
        began = self.until_event("seed", "publishing", version=version)
        if at_half is not None:
            time.sleep(max(0.0, began + bound / 2 - time.time()))
            at_half(self)
        lived = [name for name in members if name in self._members()]
        had_s = {name: self.until_event(name, "complete", version=version) - began for name in lived}
        uplinked = self.hosts["seed"].sums.sent_bytes - uplink
        spent_by = {name: now_s - before_s[name] for name, now_s in self._spent_s(["seed", *lived]).items()}
        used, idle = (after - before for before, after in zip(spent, machine_cpu_s(), strict=True))
        _, errors = publishing.communicate(timeout=PATIENCE_S)
        if publishing.returncode != 0:
            raise ProcessFailed(f"publish failed: {errors.decode()[-500:]}")
        step = self._step(version)
        again = sum(self.own_status(name).duplicate_bytes - duplicates[name] for name in lived)
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

    def interior(self) -> str:
        """Return the node with the most children over all stripes: the one whose loss hurts most."""
        status = self.seed_status()
        slots = {node.slot: node.name for node in status.nodes}
        counts = dict.fromkeys(slots.values(), 0)
        for row in status.stripes:
            for parent in row.values():
                if parent in slots:
                    counts[slots[parent]] += 1
        return max(counts, key=lambda name: (counts[name], name))

    def settle(self) -> None:
        """Wait until every started node is a member, holds the head, and is placed in every planned tree."""

        def settled() -> bool:
            status = self.seed_status()
            held = [node.held for node in status.nodes if node.standing == "fresh"]
            placed = [set(row) for row in status.stripes]
            slots = {node.slot for node in status.nodes}
            return held.count(status.head) >= len(self._members()) and bool(placed) and all(slots <= r for r in placed)

        self.wait("all nodes joined", settled)

    # ------------------------------------------------------------ internals

    def _members(self) -> list[str]:
        """The nodes that run."""
        return [name for name in self.running if name != "seed" and name not in self.paused]

    def _spent_s(self, names: Iterable[str]) -> dict[str, float]:
        pids = {name: self.running[name].pid for name in names} | {"wire": self._network.wire_pid}
        return {name: ProcessUsage(pid).cpu_s for name, pid in pids.items()}

    def _start_seed(self, flags: Sequence[str]) -> None:
        words = ("--raw-mb", str(self._raw_mb), "--announce", f"{self.hosts['seed'].address}:{PORT}", *flags)
        self._start("seed", "seed", *words)
        self.wait("the seed serves", self.status)
        self._ticket = self.ticket("--nodes", "1000")

    def _start(self, name: str, *words: str) -> None:
        node = self.nodes[name]
        rates = ("--up-mbit", str(node.up_mbit), "--down-mbit", str(node.down_mbit))
        self.start(name, *words, "--listen", f"0.0.0.0:{PORT}", "--name", name, "--region", node.region, *rates)

    def _step(self, version: str) -> Step:
        """Return the seed's report of a version, once its last holder has reported."""
        number = int(version.rpartition(".")[2])

        def steps() -> list[Step]:
            return [step for step in self.seed_status().steps if step.version[1] == number]

        self.wait("the seed reports the version", steps)
        deadline = time.monotonic() + 10.0  # a stopped node never reports, so do not wait for it forever
        while steps()[0].publish_to_all_s is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return steps()[0]


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
    warm_ups: int = WARM_UPS,
) -> list[Outcome]:
    """Publish files of `sizes` bytes one after the other, after `warm_ups` versions that do not count.

    Returns one outcome per size. `at_half` is called during the last publish, and `on_outcome` with each outcome that
    counts as soon as its publish ends. Raises `ProcessFailed` when a publish fails.
    """
    network = Network(rtt_ms=rtt_ms, between_ms=between_ms)
    raw_mb = max(sizes) // 10**6 + 2
    found = []
    with RealSwarm.started(network, seed, nodes, raw_mb, late=late) as swarm:
        for number, size in enumerate([sizes[0]] * warm_ups + list(sizes), 1):
            swarm.settle()
            time.sleep(rest_s)
            last = number == warm_ups + len(sizes)
            outcome = swarm.send(size, at_half=at_half if last else None)
            if number > warm_ups:
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
