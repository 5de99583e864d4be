"""The memory that driver and wire share: settings that may change while packets flow, and counters."""

import mmap
import os
from typing import Final

import numpy as np

__all__ = ["Shared"]


# Columns of `Shared.knobs`, float64, one row per host.
UP_RATE: Final = 0
"""Bytes per nanosecond; 0: no limit."""
DOWN_RATE: Final = 1
UP_QUEUE_NS: Final = 2
"""How long a packet may wait for the link; one that would wait longer is dropped."""
DOWN_QUEUE_NS: Final = 3
LOSS: Final = 4
FIREWALL: Final = 5
"""One of the four kinds below."""
CUT: Final = 6
"""Nonzero: no packet passes."""
KNOBS: Final = 7

OPEN: Final = 0
ANSWERS_ONLY: Final = 1
"""Admits only packets of a flow that the host began."""
NAT: Final = 2
"""Like ANSWERS_ONLY, with a private address; the outside port equals the inside port for every destination."""
SYMMETRIC: Final = 3
"""Like NAT, with a new outside port for each destination, so that hole punching fails."""

# Columns of `Shared.counters`, int64, one row per host. Bytes are those of IP packets, headers included.
SENT_BYTES: Final = 0
"""Past the host's uplink: what a provider would bill."""
RECEIVED_BYTES: Final = 1
SENT_PACKETS: Final = 2
QUEUE_DROPS: Final = 3
LOSSES: Final = 4
REFUSED: Final = 5
"""Packets that the host's firewall dropped, in either direction."""
COUNTERS: Final = 6


class Shared:
    """Views of one memory file. The other process maps the same file through `fd`."""

    def __init__(self, hosts: int, fd: int | None = None) -> None:
        """`fd`: the memory file of another process, created for the same number of hosts; None: create one."""
        knobs, delays = hosts * KNOBS, hosts * hosts
        counted = delays + hosts * COUNTERS
        size = 8 * (knobs + delays + counted)
        self.fd = os.memfd_create("wan") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        words = np.frombuffer(mmap.mmap(self.fd, size), np.int64)
        self.knobs = words[:knobs].view(np.float64).reshape(hosts, KNOBS)
        self.delays_ns = words[knobs : knobs + delays].reshape(hosts, hosts)
        """One-way delay from the row's host to the column's; negative: no packet passes."""
        self.counters = words[knobs + delays : knobs + counted].reshape(hosts, COUNTERS)
        self.carried = words[knobs + counted :].reshape(hosts, hosts)
        """Bytes of IP packets past the uplink of the row's host, bound for the column's."""
