"""Hosts and the network between them, as the driver sees it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Self

from codec.errors import UsageError
from scenarios.emulator.network import namespace
from scenarios.emulator.network import shared as shm
from scenarios.emulator.network.shared import Shared

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
"""Where a bandwidth-delay product would be nearly nothing: no router has less, and a burst needs some."""
_START_S: Final = 60.0
"""For the wire to compile, at most; once it is cached it takes a second."""


@dataclass(frozen=True, slots=True)
class Sums:
    """What has crossed one host's access link so far. Bytes of IP packets, headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    queue_drops: int
    losses: int
    refused: int


@dataclass(eq=False)
class Host:
    """A machine on the network: a namespace with one device. Made by `Network.host`."""

    name: str
    index: int
    address: str
    """Where the others find it."""
    inside: str
    """What it finds itself; differs behind NAT."""
    region: str
    delay_ms: float
    knobs: dict[int, float]
    queue_ms: float | None
    forward: dict[int, int]
    network: "Network"
    namespace_fd: int = -1
    processes: "list[subprocess.Popen[Any]]" = field(default_factory=list)

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a process on this host; `options` as for `subprocess.Popen`. It ends with the network at the latest."""
        process = subprocess.Popen(command, preexec_fn=self.enter, **self._marked(options))
        self.processes.append(process)
        return process

    def run(self, command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[Any]":
        """As `subprocess.run`, on this host."""
        return subprocess.run(command, preexec_fn=self.enter, **self._marked(options))

    @staticmethod
    def _marked(options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "env": {**(options.get("env") or os.environ), namespace.MARK: namespace.mark()}}

    @property
    def enter(self) -> Callable[[], None]:
        """For other launchers' `preexec_fn`; or called in a thread, whose sockets are this host's from then on."""
        fd = self.namespace_fd
        if fd < 0:
            raise UsageError(f"Host {self.name} is not up: start processes inside the network's `with`.")
        return lambda: namespace.enter(fd)

    def set(self, *, up_mbit: float | None = None, down_mbit: float | None = None, loss: float | None = None) -> None:
        """Change its link, also while packets flow. Queues keep their length in time."""
        for knob, value in ((shm.UP_RATE, up_mbit), (shm.DOWN_RATE, down_mbit)):
            if value is not None:
                self._turn(knob, value * _BYTES_PER_NS_OF_A_MBIT)
        if loss is not None:
            self._turn(shm.LOSS, loss)

    def cut(self, cut: bool = True) -> None:
        """Pull its cable, or (`False`) put it back in."""
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
    """Hosts with access links, a delay between each two of them. Add all hosts, then use it as a context."""

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
        """`rtt_ms`: the round trip between two hosts, or a function of their regions; `between_ms`: that between hosts
        of different regions, where it is another. Both come on top of the hosts' own delays.

        `congestion`: what sockets get that ask for nothing; None: the machine's own default. Only what every user of
        the machine may choose is possible (`reno` always is). The two buffers are the most that TCP takes by itself
        (the third number of tcp_rmem and tcp_wmem); these are what distributions ship.
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
        """Add a host. Rates in Mbit/s, 0: no limit. `delay_ms`: of its access link, one way. `loss`: the chance that
        one packet is lost on its access link, either way. `queue_ms`: the longest that a packet waits for a link of
        its; None: as long as the longest round trip from it, which is one bandwidth-delay product.

        `firewall`: "in" lets nothing in but answers; "nat" also gives it a private address; "symmetric" also a new
        outside port for each destination. `forward`: outside ports that are open, with the inside port of each.
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
        """Between two hosts, queues empty."""
        if callable(self._rtt_ms):
            path_kind = self._rtt_ms(one.region, other.region)
        elif self._between_ms is not None and one.region != other.region:
            path_kind = self._between_ms
        else:
            path_kind = self._rtt_ms
        return path_kind + 2 * (one.delay_ms + other.delay_ms)

    def entered(self) -> dict[str, int]:
        """By region: bytes of IP packets bound for its hosts that have left those of other regions so far."""
        assert self.shared is not None, "the network is not up"
        found = {host.region: 0 for host in self.hosts}
        for host in self.hosts:
            for other in self.hosts:
                if host.region != other.region:
                    found[other.region] += int(self.shared.carried[host.index, other.index])
        return found

    @property
    def wire_pid(self) -> int:
        """The process that is the network: its CPU time is what the emulation costs."""
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
            for fd in tuns:  # the wire's now: when it ends, the devices are gone
                os.close(fd)
        return self

    def __exit__(self, *_: object) -> None:
        """End every process on every host, and the network."""
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
        """In a thread of its own: the host's namespace and device; the descriptor of the latter."""
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
            "driver": os.getpid(),  # for whoever looks at a list of processes
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
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "ready\n":
            raise RuntimeError("the wire did not start")
