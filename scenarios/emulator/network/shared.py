"""The memory that driver and wire share: what may change while packets flow, and what has flowed."""

import mmap
import os
from typing import Final

import numpy as np

__all__ = ["Shared"]


# Columns of `Shared.knobs`, float64, a row a host.
UP_RATE: Final = 0
"""Bytes a nanosecond; 0: no limit."""
DOWN_RATE: Final = 1
UP_QUEUE_NS: Final = 2
"""How long a packet may wait for the link; one that would wait longer is dropped."""
DOWN_QUEUE_NS: Final = 3
LOSS: Final = 4
FIREWALL: Final = 5
"""One of those below."""
CUT: Final = 6
"""Not 0: nothing passes."""
KNOBS: Final = 7

OPEN: Final = 0
ANSWERS_ONLY: Final = 1
"""Lets in what belongs to a flow that the host began."""
NAT: Final = 2
"""The same, and the host's own address is private; an outside port is the inside one, whoever is talked to."""
SYMMETRIC: Final = 3
"""The same, with a new outside port for each destination: hole punching fails."""

# Columns of `Shared.counters`, int64, a row a host. Bytes are those of IP packets, headers included.
SENT_BYTES: Final = 0
"""Past its uplink: what a provider would bill."""
RECEIVED_BYTES: Final = 1
SENT_PACKETS: Final = 2
QUEUE_DROPS: Final = 3
LOSSES: Final = 4
REFUSED: Final = 5
"""By its firewall, either way."""
COUNTERS: Final = 6


class Shared:
    """Views of one memory file; `fd` is what the other process maps."""

    def __init__(self, hosts: int, fd: int | None = None) -> None:
        """`fd`: the memory that another process made, for as many hosts."""
        knobs, delays = hosts * KNOBS, hosts * hosts
        counted = delays + hosts * COUNTERS
        size = 8 * (knobs + delays + counted)
        self.fd = os.memfd_create("wan") if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, size)
        words = np.frombuffer(mmap.mmap(self.fd, size), np.int64)
        self.knobs = words[:knobs].view(np.float64).reshape(hosts, KNOBS)
        self.delays_ns = words[knobs : knobs + delays].reshape(hosts, hosts)
        """One way, from a row's host to a column's."""
        self.counters = words[knobs + delays : knobs + counted].reshape(hosts, COUNTERS)
        self.carried = words[knobs + counted :].reshape(hosts, hosts)
        """Bytes of IP packets past the uplink of a row's host, bound for a column's."""
