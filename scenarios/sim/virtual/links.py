"""Links: rates, delays, losses, bounded queues and congestion windows, as far as they decide when a piece arrives.

A frame waits, in this order: in the runtime's queue for its peer (pushes before pulls); in the socket, where the kernel
accepts at most `UNSENT_BYTES` that are not yet on their way; for its flow's congestion window; in the bounded queue of
the sender's uplink. Then it travels, and then it waits for the receiver's downlink and processor.

A flow stands for several connections (`swarm.transport.parallel` decides how many a path gets). Its window starts at
ten segments for each connection and doubles every round trip (slow start).

- Under `reno`, a lost packet ends slow start for the connection that lost it, and a full queue ends it for all. A
  connection after slow start grows by a segment a round trip. A loss takes three tenths (CUBIC's factor) of one
  connection's share. After an idle time longer than a retransmission timeout the window starts again.
- Under `bbr`, slow start ends when three round trips have delivered no more than those before. From then on the window
  is twice what the best round trip delivered. Losses and idle times do not change it.

Packets are lost at random, or because a queue is full. A lost frame arrives one round trip later.
"""

import random
from collections.abc import Callable

from scenarios.sim.virtual.clock import Clock
from scenarios.sim.virtual.flow import MOST_WINDOW_BYTES, MSS, Flow, Frame, Paths
from scenarios.sim.virtual.node import Node
from swarm.protocol.core.events import Event

__all__ = ["Uplinks"]

UNSENT_BYTES = 256 << 10
"""TCP_NOTSENT_LOWAT, as `swarm.transport.tuning` sets it: the kernel takes no more than this beyond its window."""
LEAST_RTO_S = 0.2
"""Shortest retransmission timeout in seconds, as in Linux (TCP_RTO_MIN)."""


class Uplinks:
    """Carries frames from node to node. `landed(flow, frame)` is called when one has arrived."""

    def __init__(
        self, clock: Clock, paths: Paths, fate: random.Random, landed: Callable[[Flow[Node], Frame], object]
    ) -> None:
        self._clock = clock
        self._fate = fate
        self._landed = landed
        self._windows = bool(paths.congestion)
        self._reno = paths.congestion == "reno"
        self.on_event: Callable[[Node, Event], object] = lambda node, event: None

    def send(self, flow: Flow[Node], frame: Frame, *, pull: bool) -> None:
        """Queue a frame for the peer."""
        (flow.pulls if pull else flow.pushes).append(frame)
        if not flow.blocked:
            self.pump(flow)

    def pump(self, flow: Flow[Node]) -> None:
        """Move frames as far as possible: from the runtime's queue into the socket, then into the uplink's queue."""
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
                self._after_idle(flow)
            frame = socket.popleft()
            flow.unsent -= wire
            flow.inflight += wire
            flow.sent_at = now
            node.queued_bytes += wire
            node.uplink.append((flow, frame))
            if len(node.uplink) == 1:
                self._clock.at(self._start(node, frame), self._depart, node)

    def _accept(self, flow: Flow[Node]) -> None:
        """The socket accepts the frames that it has room for, and the core gets their `done` events."""
        if flow.node.frozen:
            return
        while flow.unsent < UNSENT_BYTES and (flow.pushes or flow.pulls):
            frame = (flow.pushes or flow.pulls).popleft()
            flow.socket.append(frame)
            flow.unsent += frame.wire
            if frame.done is not None:
                self._clock.soon(self.on_event, flow.node, frame.done)

    def _wake(self, flow: Flow[Node], when: float) -> None:
        if not flow.waking:
            flow.waking = True
            self._clock.at(when, self._woken, flow)

    def _woken(self, flow: Flow[Node]) -> None:
        flow.waking = False
        if flow.node.sessions.get(flow.to.key.public) == flow.session:
            self.pump(flow)

    def _take_acks(self, flow: Flow[Node], now: float) -> None:
        """Acknowledged bytes leave the window, and the window grows if it was the limit."""
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

    def _take_acks_bbr(self, flow: Flow[Node], now: float, limited: bool) -> None:
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

    def _lose(self, flow: Flow[Node], now: float, pause_s: float) -> None:
        """Shrink one connection's window, unless one shrank within `pause_s`: each shrinks at most once a round
        trip."""
        if now - flow.lost_at < pause_s:
            return
        flow.lost_at = now
        if not self._reno:
            return
        flow.fast = max(0, flow.fast - 1)
        flow.cwnd = max(float(flow.first), flow.cwnd * (1 - 0.3 / flow.connections))
        flow.ssthresh = flow.cwnd

    def _after_idle(self, flow: Flow[Node]) -> None:
        """Adjust the window at the first frame after an idle time."""
        if self._reno:
            flow.ssthresh = max(flow.ssthresh, 0.75 * flow.cwnd)
            flow.cwnd = min(flow.cwnd, float(flow.first))
        else:
            flow.delivered, flow.round_at = 0, self._clock.now

    def _start(self, node: Node, frame: Frame) -> float:
        """Return when this frame will have left if it starts now, CPU time included."""
        ready = node.cpu.charge(self._clock.now, node.cpu.costs.sending_s(frame.wire))
        return max(ready, self._clock.now + frame.wire * node.up_s_byte)

    def _depart(self, node: Node) -> None:
        """The first frame in the uplink's queue has left."""
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

    def _arrive(self, flow: Flow[Node], frame: Frame) -> None:
        """A frame has arrived, unless the receiver's downlink or processor is still busy with earlier ones."""
        to, now = flow.to, self._clock.now
        down, work = frame.wire * to.down_s_byte, to.cpu.costs.receiving_s(frame.wire)
        began = now - down - work
        to.down_free_at = (to.down_free_at if to.down_free_at > began else began) + down
        ready = to.cpu.charge(to.down_free_at, work)
        if ready > now + 1e-6:
            self._clock.at(ready, self._landed, flow, frame)
        else:
            self._landed(flow, frame)

    def taken(self, flow: Flow[Node], frame: Frame) -> None:
        """The receiver has taken the frame: its acknowledgement is on its way back."""
        when = self._clock.now + flow.one_way
        flow.acks.append((when, frame.wire))
        if flow.blocked:
            self._wake(flow, when)
        elif len(flow.acks) > 64:
            self._take_acks(flow, self._clock.now)
