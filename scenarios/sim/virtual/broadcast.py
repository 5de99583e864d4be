"""How a version gets to the nodes: through the swarm, or by sending full weights as others do.

`Swarm` is the product's own protocol: a version is published in chunks, relayed along the trees, and applied. `Star`
sends the full weights over the same links from the trainer to one node of each party; the other nodes of a party get
them at the same moment at no cost. A party is a single node, a region, or all nodes. No relay can be faster than that.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from codec import chunk_target, piece_target
from scenarios.sim.crowd import HEADER_BYTES
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Node, root_of
from scenarios.sim.virtual.flow import Flow, Frame, wire_bytes
from swarm.protocol.core.events import VersionId

__all__ = ["Broadcast", "Star", "Swarm"]

Arrived = Callable[[Node, VersionId], object]
"""Called with a node and the version that it now holds."""
FRAMES = 2048
"""Number of frames of a full copy. The star's flows have no windows, so only the last frame's arrival matters."""


class Broadcast(Protocol):
    def publish(self, version: VersionId) -> float:
        """Begin to send `version`. Returns the seconds until it is sealed and thus the newest one."""
        ...

    @property
    def sent_bytes(self) -> int:
        """All bytes that the trainer has sent."""
        ...


class Swarm:
    """Publishes `payload_bytes` for each version, in chunks evenly over `extract_s` seconds."""

    def __init__(self, world: World, payload_bytes: int, extract_s: float, arrived: Arrived) -> None:
        self._world, self._payload, self._extract_s = world, payload_bytes, extract_s
        world.committed = arrived

    def publish(self, version: VersionId) -> float:
        payload = self._payload
        chunk = min(chunk_target(payload), payload)
        self._world.publish(
            chunks=max(1, round(payload / chunk)),
            chunk_bytes=chunk - HEADER_BYTES,
            piece_bytes=piece_target(payload),
            spread_s=self._extract_s,
        )
        return self._extract_s

    @property
    def sent_bytes(self) -> int:
        return self._world.authority.sent_bytes


class Star:
    """Sends `payload_bytes` for each version to the first node of each party."""

    def __init__(self, world: World, payload_bytes: int, parties: Sequence[Sequence[Node]], arrived: Arrived) -> None:
        self._world, self._payload, self._parties, self._arrived = world, payload_bytes, parties, arrived
        trainer = world.authority
        firsts = [party[0] for party in parties]
        self._flows = [
            Flow(trainer, node, trainer.sessions[node.key.public], world.one_way(trainer, node), world.paths)
            for node in firsts
        ]

    def publish(self, version: VersionId) -> float:
        size = -(-self._payload // FRAMES)
        frames = -(-self._payload // size)
        for flow, party in zip(self._flows, self._parties, strict=True):
            for i in range(frames):
                body = min(size, self._payload - i * size)
                whole = (party, version) if i == frames - 1 else ((), version)
                self._world.uplinks.send(flow, Frame(wire_bytes(body), body, None, self._landed, whole), pull=False)
        return 0.0

    def _landed(self, nodes: Sequence[Node], version: VersionId) -> None:
        for node in nodes:
            node.root = root_of(version)
            self._arrived(node, version)

    @property
    def sent_bytes(self) -> int:
        return self._world.authority.sent_bytes
