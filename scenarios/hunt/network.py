"""The network between the machines of a hunt: the product's memory transport, with faults of paths.

Bytes in a stream arrive in order or the stream breaks, as with TCP. What a machine sent before it closed a connection
in order, or before its process ended, still arrives; what is on its way when a path breaks is lost. Faults change when
bytes arrive, in which direction, and whether connections break or merely fall silent.
"""

import contextlib
import math
import random
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import trio

from swarm.transport.base import Accept, Lane, PeerKey, Unreachable
from swarm.transport.memory import Link, MemoryNetwork, MemoryStream, MemoryTransport

__all__ = ["HuntGossip", "HuntNetwork", "HuntTransport"]

_DIAL_S: Final = 10.0
"""A dial to an address from which nothing comes back fails after this."""
_GOSSIP_S: Final = 0.2
"""Time of one hop of an announcement."""
_RESETS: Final = 0.1
"""Share of the closed connections whose end loses what is on its way, as TCP resets a connection that is closed with
unread bytes."""
_SEEN: Final = 256
"""Announcements that one machine remembers."""


class HuntNetwork(MemoryNetwork):
    """All paths between machines, by the keys of their ends."""

    def __init__(self, seed: int) -> None:
        super().__init__(Link(0.01, 4e6))
        self._rng = random.Random(f"network {seed}")
        self._silent: dict[tuple[PeerKey, PeerKey], float] = {}
        """By (sender, receiver): until when nothing arrives."""
        self._late: dict[PeerKey, tuple[float, float]] = {}
        """By sender: until when, and by how many seconds, what it sends is late."""
        self.gossips: dict[PeerKey, HuntGossip] = {}

    def silence(self, source: PeerKey, target: PeerKey, until_s: float) -> None:
        """Nothing that `source` sends arrives at `target` until then; it arrives afterwards, as TCP sends it again."""
        self._silent[source, target] = max(until_s, self._silent.get((source, target), 0.0))

    def delay(self, source: PeerKey, until_s: float, delay_s: float) -> None:
        """All that `source` sends until then is so much later."""
        self._late[source] = until_s, delay_s

    def repair(self) -> None:
        """End all faults of paths."""
        self._silent.clear()
        self._late.clear()
        self._cut.clear()

    def is_silent(self, source: PeerKey, target: PeerKey) -> bool:
        return self._silent.get((source, target), 0.0) > trio.current_time()

    def arrival_s(self, source: PeerKey, target: PeerKey, length_bytes: int) -> float:
        now = trio.current_time()
        at_s = super().arrival_s(source, target, length_bytes) + self._rng.random() * 0.01
        until_s, delay_s = self._late.get(source, (0.0, 0.0))
        if until_s > now:
            at_s += delay_s
        return max(at_s, self._silent.get((source, target), 0.0))

    def disconnect(self, a: PeerKey, b: PeerKey) -> None:
        """`a` closes its connection to `b`, or its process has ended: mostly in order, sometimes by a reset."""
        if self._rng.random() < _RESETS:
            super().disconnect(a, b)
        else:
            self.close(a, b)

    def rebind(self, peer: PeerKey) -> None:
        """Every connection of `peer` breaks."""
        for pair in [pair for pair in self._streams if peer in pair]:
            self._break(pair)


class HuntTransport(MemoryTransport):
    """What stands in for `Libp2pTransport`. Its tasks run in the context of the machine that made it."""

    def __init__(self, network: HuntNetwork, key: Any, listen: Sequence[str], announce: Sequence[str] = ()) -> None:
        super().__init__(network, key)
        self.address = (*announce, *listen)[0]
        self.reservations = SimpleNamespace(state={})
        self.relay = None
        self._context = copy_context()
        self._net = network
        self.lost_power: Callable[[], bool] = lambda: False
        """Whether its machine is without power: then no peer is told that its connections are gone."""

    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self._net.rebind(self.key)  # what an earlier process of this machine left
        await super().serve(accept, task_status=task_status)

    def serve_protocol(self, protocol: str, handler: Callable[..., Any]) -> None:
        """As `Libp2pTransport`. Nobody opens such a stream: no trainer of a hunt saves a state."""

    async def open_bulk_stream(self, peer: PeerKey, protocol: str) -> Any:
        """As `Libp2pTransport`: raises `Unreachable`, since the machine that is asked serves no such stream."""
        raise Unreachable(f"{protocol} is not served")

    def peers(self) -> list[PeerKey]:
        return [] if self.lost_power() else super().peers()

    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        if self._net.is_silent(self.key, peer) or self._net.is_silent(peer, self.key):
            await trio.sleep(_DIAL_S)
            raise Unreachable("no answer")
        await super().connect(peer, addrs)

    async def probe(self, peer: PeerKey, address: str) -> bool:
        if self._net.is_silent(self.key, peer) or self._net.is_silent(peer, self.key):
            await trio.sleep(_DIAL_S)
            return False
        return await super().probe(peer, address)

    def serve_stream(self, peer: PeerKey, lane: Lane, stream: MemoryStream) -> None:
        self._context.copy().run(partial(super().serve_stream, peer, lane, stream))


class HuntGossip:
    """What stands in for `Gossip`: an announcement goes to each neighbour, and each passes it on once."""

    def __init__(self, transport: HuntTransport, topic: str, validate: Callable[[bytes], bool]) -> None:
        self.topic = topic
        self._transport = transport
        self._network: HuntNetwork = transport._net
        self._validate = validate
        self._deliver: Callable[[bytes], None] | None = None
        self._seen: dict[bytes, None] = {}
        self._send, self._waiting = trio.open_memory_channel[bytes](math.inf)
        self.loses: Callable[[], bool] = lambda: False
        """Whether an announcement that arrives now is lost."""

    async def run(
        self, deliver: Callable[[bytes], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        self._deliver = deliver
        self._network.gossips[self._transport.key] = self
        try:
            task_status.started()
            async for data in self._waiting:
                await trio.sleep(_GOSSIP_S)
                for peer in sorted(self._transport.peers()):
                    other = self._network.gossips.get(peer)
                    if other is not None and not self._network.is_silent(self._transport.key, peer):
                        other.hear(data)
        finally:
            self._deliver = None
            if self._network.gossips.get(self._transport.key) is self:
                del self._network.gossips[self._transport.key]

    async def publish(self, data: bytes) -> None:
        """Raises `Unreachable` when it does not run."""
        if self._deliver is None:
            raise Unreachable(f"not gossiping on {self.topic}")
        await trio.lowlevel.checkpoint()
        self._pass_on(data)

    def hear(self, data: bytes) -> None:
        """A neighbour announces `data`."""
        if self._deliver is None or data in self._seen or self.loses() or not self._validate(data):
            return
        self._pass_on(data)
        self._transport._context.copy().run(self._deliver, data)

    def has_seen(self, data: bytes) -> bool:
        return data in self._seen

    def _pass_on(self, data: bytes) -> None:
        if data in self._seen:
            return
        self._seen[data] = None
        while len(self._seen) > _SEEN:
            del self._seen[next(iter(self._seen))]
        with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            self._send.send_nowait(data)
