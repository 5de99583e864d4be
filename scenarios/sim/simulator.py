"""The swarm in one process under a virtual clock: the product's own `Peer` and `Authority`, with a modelled network.

Each node has a first-in-first-out uplink, a latency to every other node and a fixed time per job. A scenario can kill,
freeze or cut off a node. The simulator makes no protocol decisions: the cores make them, and `scenarios.sim.virtual`
carries out their effects. The same seed gives the same run, event by event (`World.digest`).
"""

import random
from collections.abc import Mapping

from codec import ChunkKey, Manifest
from codec.sign import Key
from scenarios.sim.virtual import (
    LAYOUT,
    Costs,
    Cpu,
    Faults,
    Link,
    Node,
    Paths,
    Published,
    VirtualNetwork,
    facts,
    root_of,
)
from swarm.protocol.authority import Authority
from swarm.protocol.core.documents import AuthorityTime, Capability
from swarm.protocol.core.events import HeaderStored, LocalChunk, LocalLeave, LocalSeal, VersionId
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Join
from swarm.protocol.member import Peer
from swarm.protocol.startup import Boot, Saved, SavedReplica, Site
from swarm.runtime import RuntimeLimits

__all__ = ["Faults", "Link", "Node", "Published", "World"]


def _records(disk: Mapping[str, bytes], prefix: str) -> list[bytes]:
    return [record for name, record in sorted(disk.items()) if name.startswith(prefix) and record]


class World(VirtualNetwork):
    """A swarm, with its network and its clock."""

    def __init__(
        self,
        tuning: Tuning,
        *,
        seed: int = 0,
        authority_link: Link | None = None,
        home: str = "",
        blocks: int = 32,
        block_bytes: int = 1 << 16,
        job_s: float = 0.001,
        paths: Paths | None = None,
        costs: Costs | None = None,
        host: Cpu | None = None,
    ) -> None:
        """Build the network and start the authority.

        `home` is the name of the trainer's region. `paths` gives the delays between regions. `host` is a processor that
        all nodes share; with None, each node has its own processor with these `costs`. `job_s` is the time of one job.
        """
        super().__init__(seed, paths=paths or Paths(), blocks=blocks, block_bytes=block_bytes, job_s=job_s)
        self.tuning = tuning
        self._costs, self._host = costs or Costs(), host
        self.rng = random.Random(seed)
        key = self._new_key()
        self.swarm = key.public
        base = VersionId(0, 0)
        self.base = Manifest(key.public, 0, 0, 0, bytes(32), root_of(base), LAYOUT, (), 0, 0).seal(key)
        self._key = key
        self._home = home
        self.authority = self._boot(key, 1, self.base, {}, authority_link or Link())
        self.capability = self._core.invite(
            Capability(key.public, self.rng.randbytes(16), self.clock(0.0) + 1e6, 1 << 20, 0)
        )

    # ------------------------------------------------------------ authority, keys and clock

    @property
    def _core(self) -> Authority:
        core = self.authority.core
        assert isinstance(core, Authority)
        return core

    def clock(self, now: float) -> AuthorityTime:
        return AuthorityTime(1_000_000.0 + now)

    def _cpu(self) -> Cpu:
        return self._host or Cpu(self._costs)

    def _workers(self) -> Cpu:
        return Cpu(self._costs, RuntimeLimits().workers)

    def _new_key(self) -> Key:
        return Key(self.rng.randbytes(32))

    def _boot(self, key: Key, boot: int, head: bytes, disk: Mapping[str, bytes], link: Link) -> Node:
        core = Authority(
            key, self.tuning, random.Random(self.rng.random()),
            Boot(boot, clock=self.clock),
            Saved(head, _records(disk, "grant/"), _records(disk, "ticket/"), _records(disk, "bar/")),
            Site(("/sim/0",), self._home),
            now=self.now,
        )  # fmt: skip
        assert core.state.manifest is not None
        root = core.state.manifest.root
        number = self.nodes[key.public].number if key.public in self.nodes else len(self.nodes)
        node = Node(key, core, link, self._cpu(), self._workers(), number, root=root, lists={root})
        self.nodes[key.public] = node
        self._carry_out(node, core.start(self.now))
        return node

    def restart_authority(self, sealed: Published | None = None) -> None:
        """Kill the authority if it is alive, and start it again from the records on its disk.

        `sealed` is a version whose seal is on that disk, although the authority died before it announced the seal to
        any peer or to its own core.
        """
        old, core = self.authority, self._core
        self.kill(old)
        head = core.state.sealed_manifest
        if sealed is not None:
            self.versions[sealed.id], head = sealed, sealed.manifest
        self.authority = self._boot(self._key, core.boot + 1, head, old.disk, old.link)
        self.authority.disk.update(old.disk)
        self.authority.lists |= old.lists
        self.authority.headers, self.authority.pieces = old.headers, old.pieces
        for header in old.headers.values():
            if VersionId(header.key.epoch, header.key.version) <= self._core.state.floor:
                self._apply(self.authority, HeaderStored(None, None, *facts(header)))

    def join(
        self,
        link: Link | None = None,
        *,
        dialable: bool = True,
        relay: bool = False,
        held: bytes | None = None,
        known_mbit: float | None = None,
        region: str = "",
    ) -> Node:
        """Start a new node with the swarm's ticket.

        `held` is the manifest of a version whose bits the node already has. `known_mbit` is the uplink rate that the
        node reports (None: the true rate).
        """
        link = link or Link()
        key = self._new_key()
        addrs = (f"/sim/{len(self.nodes)}",) if dialable else ()
        up_mbit = link.up_mbit if known_mbit is None else known_mbit
        join = Join(self.capability, addrs, f"node{len(self.nodes)}", region, up_mbit, link.down_mbit, relay)
        core = Peer(
            key, self.swarm, ("/sim/0",), join, self.tuning, random.Random(self.rng.random()),
            SavedReplica(held, LAYOUT if held else None),
        )  # fmt: skip
        node = Node(key, core, link, self._cpu(), self._workers(), len(self.nodes))
        if held is not None and core.state.manifest is not None:
            node.root = core.state.manifest.root
            node.lists.add(node.root)
        self.nodes[key.public] = node
        self._carry_out(node, core.start(self.now))
        return node

    # ------------------------------------------------------------ failures of nodes and links

    def kill(self, node: Node) -> None:
        """SIGKILL: the node stops, and its sessions end because the kernel closes its sockets."""
        node.alive = False
        for peer in sorted(node.sessions):
            self._end_session(node, self.nodes[peer])

    def freeze(self, node: Node) -> None:
        """SIGSTOP: the node stops working, and its peers get no sign of it."""
        node.frozen = True

    def thaw(self, node: Node) -> None:
        node.frozen = False
        waiting, node.later = node.later, []
        for action, args in waiting:
            action(*args)
        for _, flow in sorted(node.flows.items()):
            self.uplinks.pump(flow)

    def cut(self, a: Node, b: Node, *, one_way: bool = False) -> None:
        """Stop all packets between two nodes, or with `one_way` those from `a` to `b` only. What they send waits until
        `heal`, as bytes in a stream do. When one end closes a session, the other end sees it end as well: its transport
        would have noticed the silence.

        Acknowledgements are no packets here: what is sent against the direction of a one-way cut goes on arriving.
        """
        self.cuts.add((a.key.public, b.key.public))
        if not one_way:
            self.cuts.add((b.key.public, a.key.public))

    def heal(self) -> None:
        self.cuts.clear()
        waiting, self._held_up = self._held_up, []
        for a, b, session, action, args in waiting:
            self._carry(a, b, session, 0.0, action, *args)

    def leave(self, node: Node) -> None:
        """SIGTERM: the node tells the authority that it leaves."""
        self._apply(node, LocalLeave())

    # ------------------------------------------------------------ publishing

    def publish(
        self,
        *,
        chunks: int = 8,
        chunk_bytes: int = 1 << 18,
        piece_bytes: int = 1 << 16,
        attempt: int = 0,
        spread_s: float = 0.0,
        seal: bool = True,
    ) -> Published:
        """Publish the version after the one that the authority holds: `chunks` chunks over `spread_s` seconds, then the
        seal."""
        core = self._core
        assert core.state.held is not None
        assert core.state.manifest is not None
        id_ = VersionId(core.state.held.epoch, core.state.held.version + 1)
        sizes = tuple(min(piece_bytes, chunk_bytes - at) for at in range(0, chunk_bytes, piece_bytes))
        headers = [
            HeaderStored(
                None, None, ChunkKey(id_.epoch, id_.version, attempt, seq), self.rng.randbytes(32),
                core.state.manifest.root, sizes, 300,
            )
            for seq in range(chunks)
        ]  # fmt: skip
        ids = tuple(h.chunk_id for h in headers)
        payload = sum(sum(h.piece_bytes) + h.header_bytes for h in headers)
        parent = core.state.manifest.root
        sealed = Manifest(
            self.swarm, id_.epoch, id_.version, attempt, parent, root_of(id_), LAYOUT, ids, payload, 1
        ).seal(self._key)
        published = Published(id_, headers, sealed, payload, self.now)
        author = self.authority
        for i, header in enumerate(headers):
            self.at(self.now + spread_s * i / max(1, chunks), self._publish_chunk, author, header)
        if seal:
            self.versions[id_] = published
            self.at(self.now + spread_s, self._publish_seal, author, published)
        return published

    def roll_back(self, to: VersionId) -> Published:
        """Publish, in a new epoch, the successor of an earlier version, with a delta that changes nothing."""
        core = self._core
        assert core.state.held is not None
        id_ = VersionId(core.state.held.epoch + 1, to.version + 1)
        sealed = Manifest(self.swarm, id_.epoch, id_.version, 0, root_of(to), root_of(id_), LAYOUT, (), 0, 0).seal(
            self._key
        )
        published = self.versions[id_] = Published(id_, [], sealed, 0, self.now)
        self.at(self.now, self._publish_seal, self.authority, published)
        return published

    def _publish_chunk(self, node: Node, header: HeaderStored) -> None:
        if node.alive:
            node.headers[header.key] = header
            node.pieces[header.key] = (1 << len(header.piece_bytes)) - 1
            self._apply(node, LocalChunk(header))

    def _publish_seal(self, node: Node, published: Published) -> None:
        if node.alive:
            node.root = root_of(published.id)
            node.lists.add(node.root)
            self._apply(node, LocalSeal(published.manifest))

    def members(self) -> list[Node]:
        return [n for n in self.nodes.values() if isinstance(n.core, Peer) and n.alive and not n.frozen]

    def all_hold(self, id_: VersionId) -> bool:
        """Whether every member that is alive and not frozen holds this version."""
        return all(n.core.state.held == id_ for n in self.members())
