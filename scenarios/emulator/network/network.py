"""The driver's side of the emulator: hosts and the network between them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from codec.errors import UsageError
from scenarios.emulator.network import namespace
from scenarios.emulator.network import shared as shm
from scenarios.emulator.network.shared import Shared
from scenarios.harness.processes import next_line

__all__ = ["Host", "Network", "Sums"]

Firewall = Literal["none", "in", "nat", "symmetric"]

_FIREWALLS: Final[dict[str, int]] = {
    "none": shm.OPEN,
    "in": shm.ANSWERS_ONLY,
    "nat": shm.NAT,
    "symmetric": shm.SYMMETRIC,
}
_BYTES_PER_NS_OF_A_MBIT: Final = 1e6 / 8 / 1e9
_LEAST_QUEUE_MS: Final = 5.0
"""Lower bound of a default queue. With a round trip near 0 the bandwidth-delay product would drop every burst."""
_START_S: Final = 60.0
"""Time limit for the wire to compile; from the cache it starts within a second."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Counts of one host's access link since the start. Bytes are those of IP packets, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    queue_drops: int
    losses: int
    refused: int


@dataclass(eq=False)
class Host:
    """A host on the network: a namespace with one TUN device. Created by `Network.host`."""

    name: str
    index: int
    address: str
    """The address at which other hosts reach it."""
    inside: str
    """The address of its own device; differs from `address` behind NAT."""
    region: str
    delay_ms: float
    knobs: dict[int, float]
    queue_ms: float | None
    forward: dict[int, int]
    network: "Network"
    namespace_fd: int = -1
    processes: "list[subprocess.Popen[Any]]" = field(default_factory=list)

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process on this host; `options` as for `subprocess.Popen`. The network kills it when it ends."""
        process = subprocess.Popen(command, preexec_fn=self.enter, **self._marked(options))
        self.processes.append(process)
        return process

    def run(self, command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
        """Do what `subprocess.run` does, on this host."""
        return subprocess.run(command, preexec_fn=self.enter, **self._marked(options))

    @staticmethod
    def _marked(options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "env": {**(options.get("env") or os.environ), namespace.MARK: namespace.mark()}}

    @property
    def enter(self) -> Callable[[], None]:
        """A callable for another launcher's `preexec_fn`. In a thread it makes all sockets opened later this host's.

        Raises `UsageError` when the network is not up.
        """
        fd = self.namespace_fd
        if fd < 0:
            raise UsageError(f"Host {self.name} is not up: start processes inside the network's `with`.")
        return lambda: namespace.enter(fd)

    def set(self, *, up_mbit: float | None = None, down_mbit: float | None = None, loss: float | None = None) -> None:
        """Change the host's link, also while packets flow. Queues keep their length in milliseconds."""
        for knob, value in ((shm.UP_RATE, up_mbit), (shm.DOWN_RATE, down_mbit)):
            if value is not None:
                self._turn(knob, value * _BYTES_PER_NS_OF_A_MBIT)
        if loss is not None:
            self._turn(shm.LOSS, loss)

    def cut(self, cut: bool = True) -> None:
        """Stop all packets from and to this host, or (`False`) let them pass again."""
        self._turn(shm.CUT, float(cut))

    def _turn(self, knob: int, value: float) -> None:
        self.knobs[knob] = value
        if self.network.shared is not None:
            self.network.shared.knobs[self.index, knob] = value

    @property
    def sums(self) -> Sums:
        assert self.network.shared is not None, "the network is not up"
        return Sums(*(int(value) for value in self.network.shared.counters[self.index, : shm.COUNTERS]))


class Network:
    """Hosts with access links, and a delay between each pair. Add all hosts, then use it as a context manager."""

    def __init__(
        self,
        *,
        rtt_ms: float | Callable[[str, str], float] = 0.0,
        between_ms: float | None = None,
        mtu: int = 9000,
        congestion: str | None = None,
        receive_buffer_bytes: int = 6_291_456,
        send_buffer_bytes: int = 4_194_304,
        seed: int = 1,
    ) -> None:
        """`rtt_ms`: the round trip between two hosts, or a function of their regions. `between_ms`: the round trip
        between hosts of different regions, where it differs. The hosts' own delays are added to both.

        `congestion`: the default congestion control of sockets; None: the machine's default. Only algorithms that
        unprivileged users may choose are possible (`reno` always is). The two buffers are the upper bounds of TCP's
        autotuning (the third number of tcp_rmem and tcp_wmem); the defaults are those of Linux distributions.
        """
        self._rtt_ms = rtt_ms
        self._between_ms = between_ms
        self._mtu = mtu
        self._sysctls = {
            "tcp_rmem": f"4096 131072 {receive_buffer_bytes}",
            "tcp_wmem": f"4096 16384 {send_buffer_bytes}",
            "tcp_no_metrics_save": "1",  # one run must not teach the next one
        }
        if congestion is not None:
            self._sysctls["tcp_congestion_control"] = congestion
        self._seed = seed
        self.hosts: list[Host] = []
        self.shared: Shared | None = None
        self._wire: subprocess.Popen[str] | None = None
        self._guard_fd = -1

    def host(
        self,
        name: str = "",
        *,
        up_mbit: float = 0.0,
        down_mbit: float = 0.0,
        delay_ms: float = 0.0,
        loss: float = 0.0,
        queue_ms: float | None = None,
        firewall: Firewall | None = None,
        forward: Mapping[int, int] | None = None,
        region: str = "",
    ) -> Host:
        """Add a host. Rates are in Mbit/s; 0 means no limit. `delay_ms`: one-way delay of its access link. `loss`: the
        probability that a packet is lost on its access link, in either direction. `queue_ms`: how long a packet may
        wait for its uplink or downlink; None: the longest round trip from this host, one bandwidth-delay product.

        `firewall`: "in" admits only answers; "nat" also gives the host a private address; "symmetric" also uses a new
        outside port for each destination. `forward`: maps open outside ports to inside ports.
        """
        if self._wire is not None:
            raise UsageError("Add every host before the network is up.")
        index = len(self.hosts)
        address = f"10.77.{index // 250}.{index % 250 + 1}"
        hidden = firewall in ("nat", "symmetric")
        knobs = {
            shm.UP_RATE: up_mbit * _BYTES_PER_NS_OF_A_MBIT,
            shm.DOWN_RATE: down_mbit * _BYTES_PER_NS_OF_A_MBIT,
            shm.LOSS: loss,
            shm.FIREWALL: float(_FIREWALLS[firewall or "none"]),
            shm.CUT: 0.0,
        }
        host = Host(
            name or f"n{index}", index, address, "192.168.1.2" if hidden else address, region, delay_ms, knobs,
            queue_ms, dict(forward or {}), self,
        )  # fmt: skip
        self.hosts.append(host)
        return host

    def round_trip_ms(self, one: Host, other: Host) -> float:
        """Return the round trip between two hosts with empty queues."""
        if callable(self._rtt_ms):
            base_ms = self._rtt_ms(one.region, other.region)
        elif self._between_ms is not None and one.region != other.region:
            base_ms = self._between_ms
        else:
            base_ms = self._rtt_ms
        return base_ms + 2 * (one.delay_ms + other.delay_ms)

    def cut(self, senders: Iterable[Host], receivers: Iterable[Host]) -> None:
        """Drop every packet from one of `senders` to one of `receivers` until `heal`. What the receivers send to the
        senders passes, unless it is cut as well."""
        self._pass(senders, receivers, passes=False)

    def heal(self) -> None:
        """Undo every `cut` of this network (not that of a `Host`)."""
        self._pass(self.hosts, self.hosts, passes=True)

    def _pass(self, senders: Iterable[Host], receivers: Iterable[Host], *, passes: bool) -> None:
        """The wire drops a packet whose delay is negative, so -1 - d keeps a delay of d."""
        assert self.shared is not None, "the network is not up"
        to = list(receivers)
        for sender in senders:
            for receiver in to:
                delay_ns = self.shared.delays_ns[sender.index, receiver.index]
                if (delay_ns >= 0) != passes:
                    self.shared.delays_ns[sender.index, receiver.index] = -1 - delay_ns

    def entered(self) -> dict[str, int]:
        """Return, by region, the bytes of IP packets that hosts of other regions have sent to its hosts so far."""
        assert self.shared is not None, "the network is not up"
        found = {host.region: 0 for host in self.hosts}
        for host in self.hosts:
            for other in self.hosts:
                if host.region != other.region:
                    found[other.region] += int(self.shared.carried[host.index, other.index])
        return found

    @property
    def wire_pid(self) -> int:
        """The pid of the wire process; its CPU time is the cost of the emulation."""
        assert self._wire is not None, "the network is not up"
        return self._wire.pid

    def __enter__(self) -> Self:
        if not self.hosts:
            raise UsageError("Add a host before the network is up.")
        namespace.check_privileges()
        namespace.end_orphans()
        tuns: list[int] = []
        try:
            for host in self.hosts:
                tuns.append(namespace.in_thread(lambda host=host: self._build(host)))
            self._start_wire(tuns)
        except BaseException:
            self.__exit__()
            raise
        finally:
            for fd in tuns:  # the wire has its own copies, so the devices vanish when it ends
                os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill every process on every host, then end the network."""
        fds = [host.namespace_fd for host in self.hosts if host.namespace_fd >= 0]
        namespace.end_processes(map(namespace.inode, fds))
        if self._guard_fd >= 0:
            os.close(self._guard_fd)
        if self._wire is not None:
            self._wire.wait()
        for host in self.hosts:
            for process in host.processes:
                process.wait()
            host.namespace_fd = -1
        for fd in fds:
            os.close(fd)
        self._guard_fd = -1

    def _build(self, host: Host) -> int:
        """Create the host's namespace and TUN device; return the device's descriptor. Call in a thread of its own."""
        host.namespace_fd = namespace.new_namespace()
        lossless = not any(each.knobs[shm.LOSS] for each in self.hosts)
        tun = namespace.open_tun("wan", large_segments=lossless)
        namespace.ip("link", "set", "lo", "up")
        namespace.ip("addr", "add", f"{host.inside}/32", "dev", "wan")
        namespace.ip("link", "set", "wan", "mtu", str(self._mtu), "txqueuelen", "10000", "up")
        namespace.ip("route", "add", "default", "dev", "wan")
        for name, value in self._sysctls.items():
            namespace.set_sysctl(name, value)
        return tun

    def _start_wire(self, tuns: list[int]) -> None:
        shared = self.shared = Shared(len(self.hosts))
        for host in self.hosts:
            longest_ms = max((self.round_trip_ms(host, other) for other in self.hosts if other is not host), default=0)
            queue_ms = max(_LEAST_QUEUE_MS, longest_ms) if host.queue_ms is None else host.queue_ms
            host.knobs[shm.UP_QUEUE_NS] = host.knobs[shm.DOWN_QUEUE_NS] = queue_ms * 1e6
            for knob, value in host.knobs.items():
                shared.knobs[host.index, knob] = value
            for other in self.hosts:
                shared.delays_ns[host.index, other.index] = round(self.round_trip_ms(host, other) * 5e5)
        guard, self._guard_fd = os.pipe()
        settings = {
            "driver": os.getpid(),  # shows in a list of processes
            "hosts": [
                {"fd": tun, "address": host.address, "inside": host.inside, "forward": list(host.forward.items())}
                for host, tun in zip(self.hosts, tuns, strict=True)
            ],
            "shared_fd": shared.fd,
            "guard_fd": guard,
            "namespaces": [namespace.inode(host.namespace_fd) for host in self.hosts],
            "seed": self._seed,
        }
        try:
            self._wire = subprocess.Popen(
                [sys.executable, "-m", "scenarios.emulator.network.wire", json.dumps(settings)],
                stdout=subprocess.PIPE, text=True, pass_fds=[*tuns, shared.fd, guard], start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(guard)
            os.close(shared.fd)
        next_line(self._wire, "ready", _START_S)
