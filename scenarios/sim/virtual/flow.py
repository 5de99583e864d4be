"""The data of a simulated link: its rate and delay, the frames on it, and the state of a flow between two nodes."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from swarm.protocol.core.events import Event
from swarm.transport.parallel import target_connections

__all__ = ["MOST_WINDOW_BYTES", "MSS", "PACKET_OVERHEAD", "Flow", "Frame", "Link", "Paths", "wire_bytes"]

MSS = 1448
"""TCP payload of a packet, in bytes, at MTU 1500."""
PACKET_OVERHEAD = 1514 / 1448
"""Ethernet, IP and TCP headers with time stamps, at MTU 1500."""
FRAME_HEAD_BYTES = 49
TLS_RECORD_BYTES = 16 << 10
TLS_OVERHEAD_BYTES = 22 + 12
"""Bytes that a TLS 1.3 record adds, and the yamux frame in it."""
FIRST_WINDOW_BYTES = 10 * MSS
"""RFC 6928."""
MOST_WINDOW_BYTES = 3 << 20
"""Largest window of one connection: half of the usual tcp_rmem, as in `swarm.transport.parallel`."""


def wire_bytes(body_bytes: int) -> int:
    """Return the bytes on the socket of a frame with this much body: with its head, TLS records and yamux frames."""
    records = -(-(body_bytes + FRAME_HEAD_BYTES) // TLS_RECORD_BYTES)
    return body_bytes + FRAME_HEAD_BYTES + records * TLS_OVERHEAD_BYTES


@dataclass(slots=True)
class Link:
    """A node's connection to the internet."""

    up_mbit: float = 200.0
    latency_s: float = 0.01
    """Its part of the delay. The one-way delay between two nodes is the sum of their parts and of that between their
    regions."""
    down_mbit: float = 1e6
    region: int = 0
    loss: float = 0.0
    """Probability that a sent packet is lost."""
    queue_s: float = 0.1
    """Size of the uplink's queue, in seconds at its rate. A packet that finds it full is lost."""


class Paths(NamedTuple):
    """Delays between regions, and the kernels' congestion control."""

    one_way_s: tuple[tuple[float, ...], ...] = ((0.0,),)
    """One-way delay from each region to each other."""
    congestion: str = ""
    """`reno`, `bbr`, or empty: only the uplink limits a flow."""


class Frame(NamedTuple):
    """One header, piece or part of an answer that is being sent."""

    wire: int
    """Bytes on the socket."""
    body: int
    done: Event | None
    """Event for the sender's core when its socket has accepted the frame."""
    arrive: Callable[..., object]
    args: tuple[Any, ...]


class _HasLink(Protocol):
    link: Link


End = TypeVar("End", bound=_HasLink)


class Flow(Generic[End]):
    """The bulk data from one node to another. `End`: the type of nodes."""

    __slots__ = (
        "acks",
        "best",
        "blocked",
        "connections",
        "cwnd",
        "delivered",
        "fast",
        "first",
        "inflight",
        "lost_at",
        "node",
        "one_way",
        "pulls",
        "pushes",
        "queueing",
        "round_at",
        "sent_at",
        "session",
        "socket",
        "ssthresh",
        "stalled",
        "steady",
        "to",
        "unsent",
        "waking",
    )  # fmt: skip

    def __init__(self, node: End, to: End, session: int, one_way: float, paths: Paths) -> None:
        self.node, self.to, self.session, self.one_way = node, to, session, one_way
        self.connections = target_connections(2 * one_way, MOST_WINDOW_BYTES, node.link.up_mbit, by_bandwidth=False)
        self.first = self.connections * FIRST_WINDOW_BYTES
        self.fast = self.connections
        """Connections that have lost nothing yet."""
        self.cwnd = float(self.first) if paths.congestion else float("inf")
        self.ssthresh = float(self.connections * MOST_WINDOW_BYTES)
        self.inflight = 0
        self.best = 0.0
        """Bytes per second in the best round trip."""
        self.delivered = 0
        self.round_at = 0.0
        self.stalled = 0
        self.steady = False
        self.pushes: deque[Frame] = deque()
        self.pulls: deque[Frame] = deque()
        self.socket: deque[Frame] = deque()
        self.unsent = 0
        self.acks: deque[tuple[float, int]] = deque()
        """(arrival time, bytes) of each acknowledgement on its way."""
        self.blocked = False
        self.queueing = False
        self.waking = False
        self.lost_at = float("-inf")
        self.sent_at = float("-inf")
