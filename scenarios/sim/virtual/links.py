"""Links: rates, delays, losses, bounded queues and congestion windows, as far as they decide when a piece arrives.

A frame waits in the shell's queue for its peer (pushes before pulls), then in the socket, of which the kernel takes
`UNSENT_BYTES` beyond what is on its way, then for its flow's congestion window, then in the queue of the sender's
uplink, which is bounded, then travels, then takes its turn in the receiver's downlink and processor.

A flow is several connections together (`swarm.transport.parallel` says how many a path gets). Its window starts at ten
segments each and doubles a round trip. Under `reno` a lost packet ends that for the connection that lost it, and a full
queue for all of them; who has lost grows by a segment a round trip, a loss takes three tenths (CUBIC's factor) of one
connection's share, and after an idle time longer than a retransmission timeout the window starts again. Under `bbr`
slow start ends when three round trips brought no more; then the window is twice what the best round trip delivered,
whatever is lost, and idle times do not matter. Loss is by packet, or by a queue that is full; what was lost comes a
round trip later.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from scenarios.sim.virtual.clock import Clock
from swarm.protocol.core.events import Event
from swarm.transport.parallel import target_connections

if TYPE_CHECKING:
    from scenarios.sim.virtual.node import Node

__all__ = ["PACKET_OVERHEAD", "Flow", "Frame", "Link", "Paths", "wire_bytes"]

MSS = 1448
PACKET_OVERHEAD = 1514 / 1448
"""Ethernet, IP and TCP headers with time stamps, at MTU 1500."""
FRAME_HEAD_BYTES = 49
TLS_RECORD_BYTES = 16 << 10
TLS_OVERHEAD_BYTES = 22 + 12
"""Of a TLS 1.3 record, and of the yamux frame in it."""
FIRST_WINDOW_BYTES = 10 * MSS
"""RFC 6928."""
UNSENT_BYTES = 256 << 10
"""TCP_NOTSENT_LOWAT, as `swarm.transport.tuning` sets it: the kernel takes no more than this beyond its window."""
MOST_WINDOW_BYTES = 3 << 20
"""Of one connection: half of the usual tcp_rmem, as `swarm.transport.parallel` reckons."""
LEAST_RTO_S = 0.2


def wire_bytes(body_bytes: int) -> int:
    """What a frame of so much body takes on the socket: its head, TLS records, yamux frames."""
    records = -(-(body_bytes + FRAME_HEAD_BYTES) // TLS_RECORD_BYTES)
    return body_bytes + FRAME_HEAD_BYTES + records * TLS_OVERHEAD_BYTES


@dataclass(slots=True)
class Link:
    """What a node's connection is like."""

    up_mbit: float = 200.0
    latency_s: float = 0.01
    """Its share of the way: two nodes are the sum of theirs apart, one way, and what lies between their regions."""
    down_mbit: float = 1e6
    region: int = 0
    loss: float = 0.0
    """Of a packet that leaves."""
    queue_s: float = 0.1
    """What its uplink's queue holds, in seconds of its rate; what comes when it is full is lost."""


class Paths(NamedTuple):
    """What lies between regions, and what kernels do."""

    one_way_s: tuple[tuple[float, ...], ...] = ((0.0,),)
    """Between regions."""
    congestion: str = ""
    """`reno`, `bbr`, or none: a flow sends as its uplink lets it."""


class Frame(NamedTuple):
    """One header, piece or part on its way."""

    wire: int
    """Bytes on the socket."""
    body: int
    done: Event | None
    """Told to the sender's core when its socket took it."""
    arrive: Callable[..., object]
    args: tuple[Any, ...]


class Flow:
    """Bulk from one node to another."""

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

    def __init__(self, node: "Node", to: "Node", session: int, one_way: float, paths: Paths) -> None:
        self.node, self.to, self.session, self.one_way = node, to, session, one_way
        self.connections = target_connections(2 * one_way, MOST_WINDOW_BYTES, node.link.up_mbit, by_bandwidth=False)
        self.first = self.connections * FIRST_WINDOW_BYTES
        self.fast = self.connections
        """Connections that have lost nothing yet."""
        self.cwnd = float(self.first) if paths.congestion else float("inf")
        self.ssthresh = float(self.connections * MOST_WINDOW_BYTES)
        self.inflight = 0
        self.best = 0.0
        """Bytes a second of the best round trip."""
        self.delivered = 0
        self.round_at = 0.0
        self.stalled = 0
        self.steady = False
        self.pushes: deque[Frame] = deque()
        self.pulls: deque[Frame] = deque()
        self.socket: deque[Frame] = deque()
        self.unsent = 0
        self.acks: deque[tuple[float, int]] = deque()
        """(when it will be here, bytes)."""
        self.blocked = False
        self.queueing = False
        self.waking = False
        self.lost_at = float("-inf")
        self.sent_at = float("-inf")


class Uplinks:
    """Carries frames from node to node. `landed(flow, frame)` is called when one has arrived."""

    def __init__(
        self, clock: Clock, paths: Paths, fate: random.Random, landed: Callable[[Flow, Frame], object]
    ) -> None:
        self._clock = clock
        self._fate = fate
        self._landed = landed
        self._windows = bool(paths.congestion)
        self._reno = paths.congestion == "reno"
        self.told: Callable[[Node, Event], object] = lambda node, event: None

    def send(self, flow: Flow, frame: Frame, *, pull: bool) -> None:
        """Queue a frame for the peer."""
        (flow.pulls if pull else flow.pushes).append(frame)
        if not flow.blocked:
            self.pump(flow)

    def pump(self, flow: Flow) -> None:
        """Move what can move: from the shell into the socket, from the socket into the uplink."""
        node, now = flow.node, self._clock.now
        if flow.acks and flow.acks[0][0] <= now:
            self._take_acks(flow, now)
        if flow.queueing:
            return
        flow.blocked = False
        socket = flow.socket
        while node.alive:
            self._accept(flow)
            if not socket:
                return
            wire = socket[0].wire
            if flow.inflight + wire > flow.cwnd and flow.inflight:
                flow.blocked = True
                if flow.acks:
                    self._wake(flow, flow.acks[0][0])
                return
            if node.queued_bytes and node.queued_bytes + wire > node.queue_limit and self._windows:
                flow.fast = 0
                self._lose(flow, now, 2 * flow.one_way)
                flow.blocked = flow.queueing = True
                node.waiting.append(flow)
                return
            if not flow.inflight and now - flow.sent_at > max(LEAST_RTO_S, 4 * flow.one_way):
                self._wake_up(flow)
            frame = socket.popleft()
            flow.unsent -= wire
            flow.inflight += wire
            flow.sent_at = now
            node.queued_bytes += wire
            node.uplink.append((flow, frame))
            if len(node.uplink) == 1:
                self._clock.at(self._start(node, frame), self._depart, node)

    def _accept(self, flow: Flow) -> None:
        """The kernel takes what it has room for; that is what the core is told of."""
        if flow.node.frozen:
            return
        while flow.unsent < UNSENT_BYTES and (flow.pushes or flow.pulls):
            frame = (flow.pushes or flow.pulls).popleft()
            flow.socket.append(frame)
            flow.unsent += frame.wire
            if frame.done is not None:
                self._clock.soon(self.told, flow.node, frame.done)

    def _wake(self, flow: Flow, when: float) -> None:
        if not flow.waking:
            flow.waking = True
            self._clock.at(when, self._woken, flow)

    def _woken(self, flow: Flow) -> None:
        flow.waking = False
        if flow.node.sessions.get(flow.to.key.public) == flow.session:
            self.pump(flow)

    def _take_acks(self, flow: Flow, now: float) -> None:
        """What was acknowledged makes room; the window grows if it was the limit."""
        acks = flow.acks
        limited = flow.blocked or 2 * flow.inflight > flow.cwnd
        if not self._reno:
            self._take_acks_bbr(flow, now, limited)
            return
        while acks and acks[0][0] <= now:
            _, size = acks.popleft()
            flow.inflight -= size
            if limited and flow.cwnd < flow.connections * MOST_WINDOW_BYTES:
                fast = flow.connections if flow.cwnd < flow.ssthresh else flow.fast
                flow.cwnd += size * fast / flow.connections + (flow.connections - fast) * MSS * size / flow.cwnd

    def _take_acks_bbr(self, flow: Flow, now: float, limited: bool) -> None:
        acks = flow.acks
        while acks and acks[0][0] <= now:
            _, size = acks.popleft()
            flow.inflight -= size
            flow.delivered += size
            if limited and not flow.steady:
                flow.cwnd += size
        took = now - flow.round_at
        if took < max(2 * flow.one_way, 0.01):
            return
        rate = flow.delivered / took
        flow.stalled = 0 if rate > 1.25 * flow.best else flow.stalled + limited
        flow.steady = flow.steady or flow.stalled >= 3
        flow.best = max(flow.best, rate)
        flow.delivered, flow.round_at = 0, now
        if flow.steady and self._windows:
            flow.cwnd = max(float(flow.first), 2 * flow.best * max(2 * flow.one_way, 0.01))

    def _lose(self, flow: Flow, now: float, pause_s: float) -> None:
        """One connection of the flow gives way, unless one just did: each does once a round trip at most."""
        if now - flow.lost_at < pause_s:
            return
        flow.lost_at = now
        if not self._reno:
            return
        flow.fast = max(0, flow.fast - 1)
        flow.cwnd = max(float(flow.first), flow.cwnd * (1 - 0.3 / flow.connections))
        flow.ssthresh = flow.cwnd

    def _wake_up(self, flow: Flow) -> None:
        """After an idle time."""
        if self._reno:
            flow.ssthresh = max(flow.ssthresh, 0.75 * flow.cwnd)
            flow.cwnd = min(flow.cwnd, float(flow.first))
        else:
            flow.delivered, flow.round_at = 0, self._clock.now

    def _start(self, node: "Node", frame: Frame) -> float:
        """When this frame will have left, if it starts now; sending it costs CPU time too."""
        ready = node.cpu.charge(self._clock.now, node.cpu.costs.sending_s(frame.wire))
        return max(ready, self._clock.now + frame.wire * node.up_s_byte)

    def _depart(self, node: "Node") -> None:
        """The first frame of the uplink's queue has left."""
        flow, frame = node.uplink.popleft()
        node.queued_bytes -= frame.wire
        now = self._clock.now
        if node.uplink:
            self._clock.at(self._start(node, node.uplink[0][1]), self._depart, node)
        if node.sessions.get(flow.to.key.public) == flow.session:
            node.sent_bytes += frame.body
            node.socket_bytes += frame.wire
            if node.link.region != flow.to.link.region:
                flow.to.crossed_bytes += frame.body
            late = 0.0
            if node.link.loss and self._fate.random() < 1 - (1 - node.link.loss) ** (frame.wire // MSS + 1):
                late = 2 * flow.one_way
                self._lose(flow, now, 2 * flow.one_way / flow.connections)
            receiving = frame.wire * flow.to.down_s_byte + flow.to.cpu.costs.receiving_s(frame.wire)
            self._clock.at(now + late + flow.one_way + receiving, self._arrive, flow, frame)
        if node.waiting:
            other = node.waiting.popleft()
            other.queueing = False
            self.pump(other)
        if flow.socket and not flow.blocked:
            self.pump(flow)

    def _arrive(self, flow: Flow, frame: Frame) -> None:
        """All of it is here, unless the receiver's downlink or processor is busy with others."""
        to, now = flow.to, self._clock.now
        down, work = frame.wire * to.down_s_byte, to.cpu.costs.receiving_s(frame.wire)
        began = now - down - work
        to.down_free_at = (to.down_free_at if to.down_free_at > began else began) + down
        ready = to.cpu.charge(to.down_free_at, work)
        if ready > now + 1e-6:
            self._clock.at(ready, self._landed, flow, frame)
        else:
            self._landed(flow, frame)

    def taken(self, flow: Flow, frame: Frame) -> None:
        """The receiver has taken the frame: its acknowledgement is on its way back."""
        when = self._clock.now + flow.one_way
        flow.acks.append((when, frame.wire))
        if flow.blocked:
            self._wake(flow, when)
        elif len(flow.acks) > 64:
            self._take_acks(flow, self._clock.now)
