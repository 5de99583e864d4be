"""What processes and this machine use: memory, processor time and descriptors, from `/proc`."""

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path

__all__ = ["ProcessUsage", "machine_cpu_s"]


class ProcessUsage:
    """Memory, processor time and descriptors of one process."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    @property
    def rss_bytes(self) -> int:
        return int(re.findall(r"VmRSS:\s+(\d+) kB", (self._folder / "status").read_text())[0]) << 10

    @property
    def cpu_s(self) -> float:
        """Seconds (user and system) of all its threads, ended ones too; 0 when there is no such process."""
        try:
            fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def descriptors(self) -> int:
        return len(list((self._folder / "fd").iterdir()))

    @property
    def descriptor_kinds(self) -> Counter[str]:
        """How many there are of each kind: `file`, `memory` (memfds), `connection` (TCP sockets, also those that
        listen), `socket` (all others) and `other` (pipes, epolls and the like). Raises `OSError` when there is no such
        process."""
        tcp = self._tcp_sockets()
        found = Counter[str]()
        for link in (self._folder / "fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                found[_kind(os.readlink(link), tcp)] += 1
        return found

    def _tcp_sockets(self) -> set[str]:
        """The inodes of the TCP sockets in the network namespace of the process."""
        inodes = set[str]()
        for name in ("tcp", "tcp6"):
            with suppress(FileNotFoundError):  # a system without IPv6 has no tcp6
                inodes |= {line.split()[9] for line in (self._folder / "net" / name).read_text().splitlines()[1:]}
        return inodes


def _kind(target: str, tcp: set[str]) -> str:
    """The kind of the descriptor whose link in `/proc` leads to `target`."""
    if target.startswith("socket:["):
        return "connection" if target[len("socket:[") : -1] in tcp else "socket"
    if target.startswith("/memfd:"):
        return "memory"
    return "file" if target.startswith("/") else "other"


def machine_cpu_s() -> tuple[float, float]:
    """The processor seconds of all cores of this machine so far: (used, idle)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / hertz, idle / hertz
