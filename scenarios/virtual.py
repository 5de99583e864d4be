"""Nodes under a virtual clock, and the network between them: carries a core's effects out, as `swarm.shell` does, with
names in place of bytes.

Between two nodes whatever was sent arrives in order, or the session ends, as on a real stream; `Faults` go beyond that
and drop, repeat and delay control messages. Nothing here decides anything.
"""

import gc
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from struct import pack
from typing import Any

from blake3 import blake3

from codec import ChunkKey
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
    ManifestSeen,
    Notify,
    Opened,
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
    Stray,
    Timer,
    UnknownLabel,
    VersionId,
)  # fmt: skip
from swarm.protocol.peer import Peer
from swarm.protocol.wire import Blob, Lacks, WantBlob, WantBlock, decode, encode

__all__ = ["LAYOUT", "Faults", "Link", "Node", "Published", "VirtualNetwork", "facts", "root_of"]

DIAL_DEADLINE_S = 5.0
"""A dial that nobody answers fails after so long."""
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


@dataclass(frozen=True, slots=True)
class Faults:
    """What may befall a control message, beyond what streams allow. Probabilities; a delay lets others overtake."""

    drop: float = 0.0
    repeat: float = 0.0
    delay: float = 0.0
    delay_s: float = 1.0
    """At most."""


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
    number: int = 0
    """The order in which nodes were made."""
    alive: bool = True
    frozen: bool = False
    sessions: dict[bytes, int] = field(default_factory=dict)
    """Peers, and the number of the session with each: what was sent in one never arrives in the next."""
    banned: dict[bytes, float] = field(default_factory=dict)
    """Peers whose sessions are refused, and until when."""
    disk: dict[str, bytes] = field(default_factory=dict)
    """What `Persist` made durable."""
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
    dropped: set[tuple[VersionId, int]] = field(default_factory=set)
    """Attempts that it was told to forget."""
    later: list[Callable[[], object]] = field(default_factory=list)
    """What waits while it is frozen."""


class VirtualNetwork:
    """A clock, nodes, and what lies between. `blocks`, `block_bytes`: of the replica. `job_s`: what a job takes."""

    def __init__(self, seed: int, *, blocks: int, block_bytes: int, job_s: float) -> None:
        self.now = 0.0
        self.blocks, self.block_bytes, self.job_s = blocks, block_bytes, job_s
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self.nodes: dict[bytes, Node] = {}
        self.versions: dict[VersionId, Published] = {}
        self.events = 0
        self.cuts: set[frozenset[bytes]] = set()
        self.faults = Faults()
        self._fate = random.Random(seed + 1)
        self._held_up: list[tuple[Node, Node, int, Callable[[], object]]] = []
        """What is on its way between nodes that are cut off from one another: (from, to, session, what it does)."""
        self._sessions = 0
        self._digest = blake3()

    # ------------------------------------------------------------ time

    def run(self, until_s: float) -> None:
        """Let virtual time pass, up to `until_s`."""
        collecting = gc.isenabled()
        gc.disable()  # a million short-lived objects and no cycles: looking for some took half of all time
        try:
            while self._queue and self._queue[0][0] <= until_s:
                self.now, _, action = heapq.heappop(self._queue)
                action()
        finally:
            if collecting:
                gc.enable()
        self.now = until_s

    def run_until(self, condition: Callable[[], bool], limit_s: float, every_s: float = 0.005) -> bool:
        """Let time pass until the condition holds, for at most `limit_s`; whether it does. Looked at `every_s`."""
        end = self.now + limit_s
        while not condition():
            if self.now >= end:
                return False
            self.run(min(end, self.now + every_s))
        return True

    @property
    def digest(self) -> str:
        """Hash over every event that was applied so far: when, to whom, of which kind, with how many effects."""
        return self._digest.hexdigest()

    def _at(self, delay_s: float, action: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._count, action))

    # ------------------------------------------------------------ effects

    def _apply(self, node: Node, event: Event) -> None:
        if not node.alive:
            return
        if node.frozen:
            node.later.append(lambda: self._apply(node, event))
            return
        self.events += 1
        effects = node.core.apply(event, self.now)
        self._digest.update(pack("<dIH", self.now, node.number, len(effects) & 0xFFFF) + type(event).__name__.encode())
        self._carry_out(node, effects)

    def _carry_out(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            _DO[type(effect)](self, node, effect)

    def _latency(self, a: Node, b: Node) -> float:
        return a.link.latency_s + b.link.latency_s

    def _is_cut(self, a: Node, b: Node) -> bool:
        return bool(self.cuts) and frozenset((a.key.public, b.key.public)) in self.cuts

    def _carry(self, a: Node, b: Node, session: int, action: Callable[[], object], delay_s: float = 0.0) -> None:
        """What was sent in this session does its work at the other end, unless the session ends first."""
        if self._is_cut(a, b):
            self._held_up.append((a, b, session, action))
        else:
            self._at(delay_s + self._latency(a, b), partial(self._land, a, b, session, action))

    def _land(self, a: Node, b: Node, session: int, action: Callable[[], object]) -> None:
        if not b.alive or b.sessions.get(a.key.public) != session:
            return
        if self._is_cut(a, b):
            self._held_up.append((a, b, session, action))
        elif b.frozen:
            b.later.append(partial(self._land, a, b, session, action))
        else:
            action()

    def _do_send(self, node: Node, effect: Send) -> None:
        session = node.sessions.get(effect.peer)
        if session is None:
            return
        message = decode(encode(effect.message))
        if isinstance(message, WantBlob):
            node.asked[message.request] = (effect.peer, message.kind, message.name)
        elif isinstance(message, WantBlock):
            node.asked[message.request] = (effect.peer, 0, message.block)
        other, heard = self.nodes[effect.peer], Heard(node.key.public, message)
        faults, chance = self.faults, self._fate
        if faults.drop and chance.random() < faults.drop:
            return
        delay_s = chance.uniform(0, faults.delay_s) if faults.delay and chance.random() < faults.delay else 0.0
        for _ in range(2 if faults.repeat and chance.random() < faults.repeat else 1):
            self._carry(node, other, session, lambda: self._apply(other, heard), delay_s)

    def _do_dial(self, node: Node, effect: Dial) -> None:
        other = self.nodes[effect.peer]

        self._knock(node, other, self.now + DIAL_DEADLINE_S, 4 * self._latency(node, other))

    def _knock(self, node: Node, other: Node, until_s: float, delay_s: float) -> None:
        """Try to get through, again and again as packets are sent again, until it is too late."""

        def answer() -> None:
            if not node.alive or other.key.public in node.sessions:
                return
            if other.alive and not (other.frozen or self._is_cut(node, other)):
                self._open_session(node, other)
            elif other.alive and self.now < until_s:
                self._knock(node, other, until_s, 1.0)
            else:
                self._apply(node, PeerDown(other.key.public, True, "no answer"))

        self._at(delay_s, answer)

    def _open_session(self, node: Node, other: Node) -> None:
        self._sessions += 1
        me, peer = node.key.public, other.key.public
        node.sessions[peer] = other.sessions[me] = self._sessions
        self._apply(node, PeerUp(peer, True, "/sim/x"))
        if other.banned.get(me, 0.0) > self.now or node.banned.get(peer, 0.0) > self.now:
            del node.sessions[peer], other.sessions[me]
            self._apply(node, PeerDown(peer))
        else:
            self._apply(other, PeerUp(me, False, "/sim/y"))

    def _do_close(self, node: Node, effect: Close) -> None:
        if effect.ban_s:
            node.banned[effect.peer] = self.now + effect.ban_s
        if effect.peer in node.sessions:
            self._end_session(node, self.nodes[effect.peer])

    def _end_session(self, a: Node, b: Node) -> None:
        """What `a` has queued still arrives; then both ends hear that it is over."""
        session = a.sessions[b.key.public]

        def end(node: Node, other: Node) -> None:
            if node.sessions.get(other.key.public) == session:
                del node.sessions[other.key.public]
                self._apply(node, PeerDown(other.key.public))

        if a.alive:
            self._at(0.0, lambda: end(a, b))
        else:
            del a.sessions[b.key.public]
        self._at(self._latency(a, b), lambda: end(b, a))

    def _uplink(self, node: Node, peer: bytes, size: int, done: Event | None, arrive: Callable[[], object]) -> None:
        """`size` bytes leave when their turn comes (`done`), and arrive."""
        session, other = node.sessions.get(peer), self.nodes[peer]
        if session is None:
            return
        start = max(self.now, node.uplink_free_at)
        node.uplink_free_at = start + size * 8 / (node.link.up_mbit * 1e6)
        self._at(node.uplink_free_at - self.now, partial(self._leave, node, other, session, size, done, arrive))

    def _leave(
        self, node: Node, other: Node, session: int, size: int, done: Event | None, arrive: Callable[[], object]
    ) -> None:
        if node.frozen:
            node.later.append(partial(self._leave, node, other, session, size, done, arrive))
        elif node.alive and node.sessions.get(other.key.public) == session:
            node.sent_bytes += size
            self._carry(node, other, session, arrive)
            if done is not None:
                self._apply(node, done)

    def _do_sendheader(self, node: Node, effect: SendHeader) -> None:
        header, other = node.headers.get(effect.key), self.nodes[effect.peer]
        done = SendDone(effect.peer, effect.stripe, effect.key, -1, effect.pull)
        if header is None:  # dropped meanwhile: nothing leaves
            self._at(0.0, lambda: self._apply(node, done))
            return
        stored = HeaderStored(node.key.public, effect.stripe, *facts(header))
        self._uplink(node, effect.peer, header.header_bytes, done, lambda: self._header_came(other, stored))

    def _do_sendpiece(self, node: Node, effect: SendPiece) -> None:
        other = self.nodes[effect.peer]
        done = SendDone(effect.peer, effect.stripe, effect.key, effect.index, effect.pull)
        if effect.index not in node.pieces.get(effect.key, ()):
            self._at(0.0, lambda: self._apply(node, done))
            return
        size = node.headers[effect.key].piece_bytes[effect.index]
        stored = PieceStored(node.key.public, effect.stripe, effect.key, effect.index, size)
        self._uplink(node, effect.peer, size, done, lambda: self._piece_came(other, stored, size))

    def _header_came(self, node: Node, event: HeaderStored) -> None:
        if event.key not in node.headers:
            if self._out_of_date(node, event.key):
                self._apply(node, Stray(event.peer or b"", event.stripe, event.header_bytes))
                return
            node.headers[event.key] = event
            node.pieces[event.key] = set()
        self._apply(node, event)

    def _piece_came(self, node: Node, event: PieceStored, size: int) -> None:
        giver = event.peer or b""
        if event.key not in node.headers:
            honest = self._out_of_date(node, event.key)
            stray = Stray(giver, event.stripe, size)
            self._apply(node, stray if honest else PieceBad(giver, "piece before its header"))
            return
        node.received_bytes += size
        node.duplicate_bytes += size if event.index in node.pieces[event.key] else 0
        node.pieces[event.key].add(event.index)
        self._apply(node, event)

    def _out_of_date(self, node: Node, key: ChunkKey) -> bool:
        id_, held = VersionId(key.epoch, key.version), node.core.state.held
        return (id_, key.attempt) in node.dropped or (held is not None and id_ <= held)

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
        self._uplink(node, peer, size, None, lambda: self._parts(other, node, request, label))

    def _parts(self, node: Node, giver: Node, request: int, label: VersionId) -> None:
        asked = node.asked.pop(request, None)
        if asked is None:
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
            return True, Opened(node.root, node.root == b"")
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
        def durable() -> None:
            node.disk[effect.name] = effect.record
            self._apply(node, Persisted(effect.token))

        self._at(0.001, durable)

    def _do_settimer(self, node: Node, effect: SetTimer) -> None:
        node.timers[effect.name] = effect.at
        self._at(
            effect.at - self.now,
            lambda: node.timers.get(effect.name) == effect.at and self._apply(node, Timer(effect.name)),
        )

    def _do_drop(self, node: Node, effect: Drop) -> None:
        if effect.attempt is not None:
            node.dropped.add((effect.version, effect.attempt))
        for key in [k for k in node.headers if (k.epoch, k.version) == effect.version]:
            if effect.attempt is None or key.attempt == effect.attempt:
                del node.headers[key], node.pieces[key]

    def _do_commit(self, node: Node, effect: Commit) -> None:
        node.held_at[effect.version] = self.now

    def _do_announce(self, node: Node, effect: Announce) -> None:
        """Gossip: to everyone that it is connected to, a little later."""
        seen = ManifestSeen(effect.manifest)
        for peer in sorted(node.sessions):
            other = self.nodes[peer]
            if isinstance(other.core, Peer):
                self._carry(node, other, node.sessions[peer], partial(self._apply, other, seen), 0.05)

    def _do_notify(self, node: Node, effect: Notify) -> None:
        node.told.append(effect)


def facts(header: HeaderStored) -> tuple[Any, ...]:
    return header.key, header.chunk_id, header.parent_root, header.piece_bytes, header.header_bytes


_DO: dict[type, Callable[[VirtualNetwork, Node, Any], None]] = {
    kind: getattr(VirtualNetwork, f"_do_{kind.__name__.lower()}")
    for kind in (
        Announce, Close, Commit, Dial, Drop, Notify, Persist, Run, Send, SendBlob, SendBlock, SendHeader, SendPiece,
        SetTimer,
    )
}  # fmt: skip
