"""The swarm in one process under a virtual clock: the product's own `Peer` and `Authority`, with a modelled network.

Each node has an uplink (first in, first out), a latency to every other, a fixed time for jobs, and may be killed,
frozen or cut off. Nothing here decides anything: it carries effects out, as `swarm.shell` does, with names in place of
bytes. One seed gives one run, event by event.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from codec import ChunkKey, Manifest
from codec.sign import Key
from swarm.protocol.authority import Authority
from swarm.protocol.events import (
    Announce,
    Close,
    Commit,
    Dial,
    Drop,
    Effect,
    Event,
    HeaderStored,
    Heard,
    Job,
    JobDone,
    JobKind,
    LocalChunk,
    LocalSeal,
    ManifestSeen,
    Notify,
    PartsDone,
    PeerDown,
    PeerUp,
    Persist,
    Persisted,
    PieceBad,
    PieceStored,
    Run,
    Send,
    SendBlob,
    SendBlock,
    SendDone,
    SendHeader,
    SendPiece,
    SetTimer,
    Timer,
    UnknownLabel,
    VersionId,
)  # fmt: skip
from swarm.protocol.lease import AuthorityTime, Capability
from swarm.protocol.peer import Peer
from swarm.protocol.tuning import Tuning
from swarm.protocol.wire import Blob, Join, Lacks, WantBlob, WantBlock, decode, encode

__all__ = ["Link", "Node", "Published", "World"]

LAYOUT = blake3(b"simulated layout").digest()


def root_of(id_: VersionId) -> bytes:
    """The root that stands for a version's bits."""
    return blake3(f"root {id_.epoch}.{id_.version}".encode()).digest()


@dataclass(slots=True)
class Link:
    """What a node's connection is like."""

    up_mbit: float = 200.0
    latency_s: float = 0.01
    """Half of its share of a round trip: two nodes are the sum of their latencies apart, one way."""


@dataclass(slots=True)
class Published:
    """One published version: its chunks and its seal."""

    id: VersionId
    headers: list[HeaderStored]
    manifest: bytes
    payload_bytes: int
    at: float = 0.0


@dataclass(slots=True)
class Node:
    """A simulated host: a core, and what its disk and replica would hold."""

    key: Key
    core: Peer | Authority
    link: Link
    alive: bool = True
    frozen: bool = False
    sessions: set[bytes] = field(default_factory=set)
    headers: dict[ChunkKey, HeaderStored] = field(default_factory=dict)
    pieces: dict[ChunkKey, set[int]] = field(default_factory=dict)
    root: bytes = b""
    labels: dict[int, VersionId] = field(default_factory=dict)
    """While catching up: the version of each block that was fetched."""
    lists: set[bytes] = field(default_factory=set)
    """Roots whose block hashes it holds."""
    uplink_free_at: float = 0.0
    sent_bytes: int = 0
    duplicate_bytes: int = 0
    received_bytes: int = 0
    timers: dict[str, float] = field(default_factory=dict)
    asked: dict[int, tuple[bytes, int, Any]] = field(default_factory=dict)
    held_at: dict[VersionId, float] = field(default_factory=dict)
    told: list[Notify] = field(default_factory=list)
    later: list[tuple[Event, str]] = field(default_factory=list)
    """Events that wait while it is frozen."""


class World:
    """A swarm, its network and its clock."""

    def __init__(
        self,
        tuning: Tuning,
        *,
        seed: int = 0,
        authority_link: Link | None = None,
        blocks: int = 32,
        block_bytes: int = 1 << 16,
        job_s: float = 0.001,
    ) -> None:
        self.now = 0.0
        self.tuning = tuning
        self.rng = random.Random(seed)
        self.blocks, self.block_bytes, self.job_s = blocks, block_bytes, job_s
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self.nodes: dict[bytes, Node] = {}
        self.cuts: set[frozenset[bytes]] = set()
        self.versions: dict[VersionId, Published] = {}
        self.events = 0
        key = self._new_key()
        self.swarm = key.public
        base = VersionId(0, 0)
        self.base = Manifest(key.public, 0, 0, 0, bytes(32), root_of(base), LAYOUT, (), 0, 0).seal(key)
        self._key = key
        self.authority = self._boot(key, 1, self.base, [], authority_link or Link())
        self.capability = self._core.invite(
            Capability(key.public, self.rng.randbytes(16), self.clock(0.0) + 1e6, 1 << 20, 0)
        )

    # ------------------------------------------------------------ people and time

    @property
    def _core(self) -> Authority:
        core = self.authority.core
        assert isinstance(core, Authority)
        return core

    def clock(self, now: float) -> AuthorityTime:
        return AuthorityTime(1_000_000.0 + now)

    def _new_key(self) -> Key:
        return Key(self.rng.randbytes(32))

    def _boot(self, key: Key, boot: int, head: bytes, grants: list[bytes], link: Link) -> Node:
        core = Authority(
            key, ("/sim/0",), self.tuning, random.Random(self.rng.random()),
            boot=boot, clock=self.clock, head=head, grants=grants, now=self.now,
        )  # fmt: skip
        assert core.state.manifest is not None
        root = core.state.manifest.root
        node = Node(key, core, link, root=root, lists={root})
        self.nodes[key.public] = node
        self._carry_out(node, core.start(self.now))
        return node

    def restart_authority(self) -> None:
        """Kill the authority and start it again from what its disk holds."""
        old, core = self.authority, self._core
        self.kill(old)
        grants = [lease.sealed for lease in core.book.leases.values()]
        self.authority = self._boot(self._key, core.boot + 1, core.state.sealed_manifest, grants, old.link)
        self.authority.headers, self.authority.pieces = old.headers, old.pieces
        for header in old.headers.values():
            if VersionId(header.key.epoch, header.key.version) <= core.state.floor:
                self._apply(self.authority, HeaderStored(None, None, *_facts(header)))

    def join(
        self, link: Link | None = None, *, dialable: bool = True, relay: bool = False, held: bytes | None = None
    ) -> Node:
        """Start a new node with the swarm's ticket. `held`: it has this version's bits already."""
        link = link or Link()
        key = self._new_key()
        addrs = (f"/sim/{len(self.nodes)}",) if dialable else ()
        join = Join(self.capability, addrs, f"node{len(self.nodes)}", "", link.up_mbit, 1000.0, relay)
        core = Peer(
            key, self.swarm, ("/sim/0",), join, self.tuning, random.Random(self.rng.random()),
            held=held, layout_hash=LAYOUT if held else None,
        )  # fmt: skip
        node = Node(key, core, link)
        if held is not None and core.state.manifest is not None:
            node.root = core.state.manifest.root
            node.lists.add(node.root)
        self.nodes[key.public] = node
        self._carry_out(node, core.start(self.now))
        return node

    def run(self, until_s: float) -> None:
        """Let virtual time pass, up to `until_s`."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        self.now = until_s

    def run_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until the condition holds, for at most `limit_s`; whether it does."""
        end = self.now + limit_s
        while not condition() and self._queue and self._queue[0][0] <= end:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return condition()

    def _at(self, delay_s: float, action: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._count, action))

    # ------------------------------------------------------------ what befalls nodes

    def kill(self, node: Node) -> None:
        """SIGKILL: its sessions end as the kernel closes its sockets."""
        node.alive = False
        for peer in sorted(node.sessions):
            self._end_session(node, self.nodes[peer])

    def freeze(self, node: Node) -> None:
        """SIGSTOP: it does nothing; nobody is told."""
        node.frozen = True

    def thaw(self, node: Node) -> None:
        node.frozen = False
        waiting, node.later = node.later, []
        for event, _ in waiting:
            self._apply(node, event)

    def cut(self, a: Node, b: Node) -> None:
        """No packets between these two from now on."""
        self.cuts.add(frozenset((a.key.public, b.key.public)))

    def heal(self) -> None:
        self.cuts.clear()

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
        seal_as: VersionId | None = None,
    ) -> Published:
        """Publish the version after the newest one: `chunks` chunks over `spread_s` seconds, then the seal."""
        core = self._core
        assert core.state.held is not None
        assert core.state.manifest is not None
        id_ = seal_as or VersionId(core.state.held.epoch, core.state.held.version + 1)
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
            self._at(spread_s * i / max(1, chunks), lambda h=header: self._publish_chunk(author, h))
        if seal:
            self.versions[id_] = published
            self._at(spread_s, lambda: self._publish_seal(author, published))
        return published

    def _publish_chunk(self, node: Node, header: HeaderStored) -> None:
        if node.alive:
            node.headers[header.key] = header
            node.pieces[header.key] = set(range(len(header.piece_bytes)))
            self._apply(node, LocalChunk(header))

    def _publish_seal(self, node: Node, published: Published) -> None:
        if node.alive:
            node.root = root_of(published.id)
            node.lists.add(node.root)
            self._apply(node, LocalSeal(published.manifest))

    def members(self) -> list[Node]:
        return [n for n in self.nodes.values() if isinstance(n.core, Peer) and n.alive and not n.frozen]

    def all_hold(self, id_: VersionId) -> bool:
        """Every living member's replica is this version."""
        return all(n.core.state.held == id_ for n in self.members())

    # ------------------------------------------------------------ the shell

    def _apply(self, node: Node, event: Event) -> None:
        if not node.alive:
            return
        if node.frozen:
            node.later.append((event, ""))
            return
        self.events += 1
        self._carry_out(node, node.core.apply(event, self.now))

    def _carry_out(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            getattr(self, f"_do_{type(effect).__name__.lower()}")(node, effect)

    def _latency(self, a: Node, b: Node) -> float:
        return a.link.latency_s + b.link.latency_s

    def _joined(self, a: Node, b: Node) -> bool:
        open_ = b.alive and b.key.public in a.sessions and self.nodes.get(b.key.public) is b
        return open_ and frozenset((a.key.public, b.key.public)) not in self.cuts

    def _deliver(self, a: Node, peer: bytes, delay_s: float, event: Event) -> None:
        b = self.nodes[peer]
        if self._joined(a, b):
            self._at(delay_s + self._latency(a, b), lambda: self._joined(b, a) and self._apply(b, event))

    def _do_send(self, node: Node, effect: Send) -> None:
        message = decode(encode(effect.message))
        if isinstance(message, WantBlob):
            node.asked[message.request] = (effect.peer, message.kind, message.name)
        elif isinstance(message, WantBlock):
            node.asked[message.request] = (effect.peer, 0, message.block)
        self._deliver(node, effect.peer, 0.0, Heard(node.key.public, message))

    def _do_dial(self, node: Node, effect: Dial) -> None:
        other = self.nodes[effect.peer]
        cut = frozenset((node.key.public, effect.peer)) in self.cuts
        if not other.alive or cut:
            self._at(0.05, lambda: self._apply(node, PeerDown(effect.peer, True, "no answer")))
            return

        def open_() -> None:
            if not (node.alive and other.alive) or effect.peer in node.sessions:
                return
            node.sessions.add(effect.peer)
            other.sessions.add(node.key.public)
            self._apply(node, PeerUp(effect.peer, True, "/sim/x"))
            self._apply(other, PeerUp(node.key.public, False, "/sim/y"))

        self._at(4 * self._latency(node, other), open_)

    def _do_close(self, node: Node, effect: Close) -> None:
        self._end_session(node, self.nodes[effect.peer])

    def _end_session(self, a: Node, b: Node) -> None:
        if b.key.public not in a.sessions:
            return
        a.sessions.discard(b.key.public)
        b.sessions.discard(a.key.public)
        self._at(0.0, lambda: self._apply(a, PeerDown(b.key.public)))
        self._at(self._latency(a, b), lambda: self._apply(b, PeerDown(a.key.public)))

    def _uplink(self, node: Node, size: int) -> float:
        """Seconds from now until `size` bytes have left."""
        start = max(self.now, node.uplink_free_at)
        node.uplink_free_at = start + size * 8 / (node.link.up_mbit * 1e6)
        node.sent_bytes += size
        return node.uplink_free_at - self.now

    def _do_sendheader(self, node: Node, effect: SendHeader) -> None:
        header = node.headers.get(effect.key)
        if header is None or effect.peer not in node.sessions:
            return
        left = self._uplink(node, header.header_bytes)
        done = SendDone(effect.peer, effect.stripe, effect.key, -1, effect.pull)
        self._at(left, lambda: self._apply(node, done))
        stored = HeaderStored(node.key.public, effect.stripe, *_facts(header))
        self._arrive(node, effect.peer, left, effect.key, stored)

    def _do_sendpiece(self, node: Node, effect: SendPiece) -> None:
        if effect.index not in node.pieces.get(effect.key, ()) or effect.peer not in node.sessions:
            return
        size = node.headers[effect.key].piece_bytes[effect.index]
        left = self._uplink(node, size)
        done = SendDone(effect.peer, effect.stripe, effect.key, effect.index, effect.pull)
        self._at(left, lambda: self._apply(node, done))
        stored = PieceStored(node.key.public, effect.stripe, effect.key, effect.index)
        self._arrive(node, effect.peer, left, effect.key, stored)

    def _arrive(
        self, node: Node, peer: bytes, delay_s: float, key: ChunkKey, event: HeaderStored | PieceStored
    ) -> None:
        other = self.nodes[peer]

        def land() -> None:
            if not self._joined(node, other) or not other.alive:
                return
            if isinstance(event, HeaderStored):
                other.headers[key] = event
                other.pieces.setdefault(key, set())
            elif key not in other.headers:
                self._apply(other, PieceBad(node.key.public, "piece before its header"))
                return
            else:
                size = other.headers[key].piece_bytes[event.index]
                other.received_bytes += size
                other.duplicate_bytes += size if event.index in other.pieces[key] else 0
                other.pieces[key].add(event.index)
            self._apply(other, event)

        self._at(delay_s + self._latency(node, other), land)

    def _do_sendblob(self, node: Node, effect: SendBlob) -> None:
        known = effect.name in node.lists if effect.kind == Blob.HASHES else node.root != b""
        self._answer(node, effect.peer, effect.request, self.blocks * 32, known)

    def _do_sendblock(self, node: Node, effect: SendBlock) -> None:
        self._answer(node, effect.peer, effect.request, self.block_bytes, node.root != b"")

    def _answer(self, node: Node, peer: bytes, request: int, size: int, known: bool) -> None:
        if not known:
            self._do_send(node, Send(peer, Lacks(request)))
            return
        other = self.nodes[peer]
        label = node.core.state.held or VersionId(0, 0)
        left = self._uplink(node, size)
        self._at(left + self._latency(node, other), lambda: self._parts(other, node, request, label))

    def _parts(self, node: Node, giver: Node, request: int, label: VersionId) -> None:
        asked = node.asked.pop(request, None)
        if asked is None or not self._joined(giver, node):
            return
        _, kind, name = asked
        event: Event
        if kind == Blob.HASHES:
            node.lists.add(name)
            of = next(v for v in [VersionId(0, 0), *self.versions] if root_of(v) == name)
            differs = tuple(range(self.blocks)) if node.root != name else ()
            event = PartsDone(giver.key.public, request, of, differs)
        elif kind == 0 and root_of(label) not in node.lists:
            event = UnknownLabel(giver.key.public, request, label)
        else:
            if kind == 0:
                node.labels[name] = label
            event = PartsDone(giver.key.public, request, label)
        self._apply(node, event)

    def _do_run(self, node: Node, effect: Run) -> None:
        self._at(self.job_s, lambda: self._apply(node, JobDone(effect.job, *self._work(node, effect.job))))

    def _work(self, node: Node, job: Job) -> tuple[bool, Any]:
        if job.kind == JobKind.OPEN:
            return True, (node.root, None)
        if job.kind == JobKind.STAGE:
            assert job.key is not None
            header = node.headers[job.key]
            whole = len(node.pieces[job.key]) == len(header.piece_bytes)
            return whole and header.parent_root == node.root, (0,)
        version = node.core.state.chunks.version(job.version)
        if job.kind == JobKind.COMMIT:
            assert version is not None
            assert version.manifest is not None
            if not version.complete or version.manifest.parent_root != node.root:
                return False, "root"
            node.root = version.manifest.root
            node.lists.add(node.root)
            return True, None
        for block in range(self.blocks):
            if node.labels.get(block, VersionId(0, 0)) < job.version and version is not None and version.complete:
                node.labels[block] = job.version
        bad = tuple(b for b in range(self.blocks) if node.labels.get(b, VersionId(0, 0)) < job.version)
        if not bad and set(node.labels.values()) == {job.version}:
            node.root = root_of(job.version)
        return not bad, bad

    def _do_persist(self, node: Node, effect: Persist) -> None:
        self._at(0.001, lambda: self._apply(node, Persisted(effect.token)))

    def _do_settimer(self, node: Node, effect: SetTimer) -> None:
        node.timers[effect.name] = effect.at
        self._at(
            effect.at - self.now,
            lambda: node.timers.get(effect.name) == effect.at and self._apply(node, Timer(effect.name)),
        )

    def _do_drop(self, node: Node, effect: Drop) -> None:
        for key in [k for k in node.headers if (k.epoch, k.version) == effect.version]:
            if effect.attempt is None or key.attempt == effect.attempt:
                del node.headers[key], node.pieces[key]

    def _do_commit(self, node: Node, effect: Commit) -> None:
        node.held_at[effect.version] = self.now

    def _do_announce(self, node: Node, effect: Announce) -> None:
        """Gossip: to everyone that it is connected to, a little later."""
        for peer in sorted(node.sessions):
            if isinstance(self.nodes[peer].core, Peer):
                self._deliver(node, peer, 0.05, ManifestSeen(effect.manifest))

    def _do_notify(self, node: Node, effect: Notify) -> None:
        node.told.append(effect)


def _facts(header: HeaderStored) -> tuple[Any, ...]:
    return header.key, header.chunk_id, header.parent_root, header.piece_bytes, header.header_bytes
