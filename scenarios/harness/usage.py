"""What processes and this machine use: memory, processor time and descriptors, from `/proc`."""

import os
import re
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


def machine_cpu_s() -> tuple[float, float]:
    """The processor seconds of all cores of this machine so far: (used, idle)."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    hertz = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle) / hertz, idle / hertz
