"""Nodes under a virtual clock and the network between them. It carries out a core's effects, as `swarm.runtime` does,
but moves names and sizes instead of bytes.

What one node sends to another arrives in order, or the session ends, as on a real stream. `Faults` also drop, repeat
and delay control messages. Every decision is the core's.
"""

import random
from collections.abc import Callable
from typing import Any

from codec import ChunkKey
from scenarios.sim.virtual.clock import Clock
from scenarios.sim.virtual.flow import Flow, Frame, Paths, wire_bytes
from scenarios.sim.virtual.links import Uplinks
from scenarios.sim.virtual.node import Faults, Node, Published, facts, root_of
from swarm.protocol.core.events import (  # fmt: skip
    Announce,
    Close,
    Dial,
    Drop,
    Effect,
    Event,
    Gave,
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
    Probe,
    Probed,
    Ready,
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
    VersionApplied,
    VersionId,
)
from swarm.protocol.core.notices import Notice
from swarm.protocol.core.wire import Blob, Lacks, WantBlob, WantBlock, Work, decode, encode
from swarm.protocol.member import Peer
from swarm.protocol.transfer.arrivals import Arrival, header_arrival, piece_arrival

__all__ = ["VirtualNetwork"]

SYN_S = tuple(n / 4 for n in range(20))
"""When a dial sends its first packet, and sends it again while there is no answer; as in the product
(`swarm/transport/connection/tcp.py`)."""
DIAL_DEADLINE_S = 5.0
"""A dial without an answer fails after this time; as there."""
CONTROL_OVERHEAD_BYTES = 4 + 34
"""What a control message needs beyond its body: the length prefix; the TLS record and the yamux frame."""
_GOSSIP_AFTER_S = 1.0
"""Delay of a gossip message; that of the product's first members."""
LARGE_BYTES = 4096
"""A control message of at least this size occupies the uplink; smaller ones do not."""


class VirtualNetwork(Clock):
    """A clock, nodes, and the network between them. A replica has `blocks` blocks of `block_bytes`; a job (decoding a
    chunk, applying a version) takes `job_s` seconds."""

    def __init__(self, seed: int, *, paths: Paths, blocks: int, block_bytes: int, job_s: float) -> None:
        super().__init__()
        self.blocks, self.block_bytes, self.job_s = blocks, block_bytes, job_s
        self.nodes: dict[bytes, Node] = {}
        self.versions: dict[VersionId, Published] = {}
        self.cuts: set[tuple[bytes, bytes]] = set()
        """(sender, receiver) between which nothing passes in this direction."""
        self.faults = Faults()
        self._fate = random.Random(seed + 1)
        self._held_up: list[tuple[Node, Node, int, Callable[..., object], tuple[Any, ...]]] = []
        """Deliveries between nodes cut off from each other: (sender, receiver, session, function, arguments)."""
        self._sessions = 0
        self.paths = paths
        self.uplinks = Uplinks(self, paths, self._fate, self._frame_arrived)
        self.uplinks.on_event = self._apply
        self.on_notice: Callable[[Node, Notice], object] = lambda node, notice: node.notices.append(notice)
        """Called with each notice of a node's core. By default the notice is kept in `node.notices`."""
        self.committed: Callable[[Node, VersionId], object] = lambda node, version: None
        """Called when a node's replica has become this version."""

    # ------------------------------------------------------------ events and effects

    def _apply(self, node: Node, event: Event) -> None:
        if not node.alive:
            return
        if node.frozen:
            node.later.append((self._apply, (node, event)))
            return
        effects = node.core.apply(event, self.now)
        kind = type(event)
        self.note(node.number, _NAMES.get(kind) or kind.__name__.encode(), len(effects))
        for effect in effects:
            _DO[type(effect)](self, node, effect)

    def _carry_out(self, node: Node, effects: list[Effect]) -> None:
        for effect in effects:
            _DO[type(effect)](self, node, effect)

    def one_way(self, a: Node, b: Node) -> float:
        """Return the one-way delay in seconds."""
        return a.link.latency_s + b.link.latency_s + self.paths.one_way_s[a.link.region][b.link.region]

    def _is_cut(self, a: Node, b: Node) -> bool:
        """Whether nothing passes from `a` to `b`."""
        return bool(self.cuts) and (a.key.public, b.key.public) in self.cuts

    def _cannot_connect(self, a: Node, b: Node) -> bool:
        """Whether something is lost between them in one direction at least: a connection needs both."""
        return self._is_cut(a, b) or self._is_cut(b, a)

    # ------------------------------------------------------------ control messages

    def _carry(self, a: Node, b: Node, session: int, delay_s: float, action: Callable[..., object], *args: Any) -> None:
        """Call `action` at the receiver after the delay, unless the session ends first."""
        if self.cuts and self._is_cut(a, b):
            self._held_up.append((a, b, session, action, args))
        else:
            self.at(self.now + delay_s + self.one_way(a, b), self._land, a, b, session, action, args)

    def _land(self, a: Node, b: Node, session: int, action: Callable[..., object], args: tuple[Any, ...]) -> None:
        if not b.alive or b.sessions.get(a.key.public) != session:
            return
        if self.cuts and self._is_cut(a, b):
            self._held_up.append((a, b, session, action, args))
        elif b.frozen:
            b.later.append((self._land, (a, b, session, action, args)))
        else:
            action(*args)

    def _do_send(self, node: Node, effect: Send) -> None:
        session = node.sessions.get(effect.peer)
        if session is None:
            return
        data = encode(effect.message)
        message = decode(data) if len(data) < LARGE_BYTES else effect.message
        if isinstance(message, WantBlob):
            node.asked[message.request] = (effect.peer, message.kind, message.name)
        elif isinstance(message, WantBlock):
            node.asked[message.request] = (effect.peer, 0, message.block)
        other = self.nodes[effect.peer]
        node.socket_bytes += len(data) + CONTROL_OVERHEAD_BYTES
        delay_s = other.cpu.costs.message_s
        if len(data) >= LARGE_BYTES:
            delay_s += len(data) * node.up_s_byte
        faults, chance = self.faults, self._fate
        if faults.drop and chance.random() < faults.drop:
            return
        if faults.delay and chance.random() < faults.delay:
            delay_s += chance.uniform(0, faults.delay_s)
        heard = Heard(node.key.public, message)
        for _ in range(2 if faults.repeat and chance.random() < faults.repeat else 1):
            self._carry(node, other, session, delay_s, self._apply, other, heard)

    def send_work(self, node: Node, peer: bytes, body: bytes) -> None:
        """Send a `Work` body in the session with `peer`. Without a session it is lost."""
        self._do_send(node, Send(peer, Work(body)))

    def send_heavy_work(self, node: Node, peer: bytes, body: bytes, size_bytes: int) -> None:
        """Send a `Work` body that occupies the uplink like `size_bytes` of bulk. Bodies sent this way arrive in
        order."""
        if (flow := self._flow(node, peer)) is not None:
            heard = Heard(node.key.public, Work(body))
            frame = Frame(wire_bytes(size_bytes), 0, None, self._apply, (flow.to, heard))
            self.uplinks.send(flow, frame, pull=False)

    # ------------------------------------------------------------ sessions

    def _do_dial(self, node: Node, effect: Dial) -> None:
        other = self.nodes[effect.peer]
        self._connect(node, other, self.now, 0)

    def _do_probe(self, node: Node, effect: Probe) -> None:
        """Dial back the addresses: they answer if their node is alive, not frozen and not cut off."""
        other = self.nodes[effect.peer]

        def answer() -> None:
            there = other.alive and not (other.frozen or self._cannot_connect(node, other))
            self._apply(node, Probed(effect.peer, effect.addrs if there else ()))

        self.at(self.now + 4 * self.one_way(node, other), answer)

    def _do_ready(self, node: Node, effect: Ready) -> None:
        """Nothing to do: simulated connections are usable from the hello on."""

    def _connect(self, node: Node, other: Node, began_s: float, tries: int) -> None:
        """Send the first packet of a connection, and again at the times `SYN_S` while the nodes are cut off."""

        def answer() -> None:
            if not node.alive or other.key.public in node.sessions:
                return
            if not other.alive or tries == len(SYN_S):
                self._apply(node, PeerDown(other.key.public, True, "no answer"))
            elif other.frozen or self._cannot_connect(node, other):
                self._connect(node, other, began_s, tries + 1)
            else:
                self._open_session(node, other)

        sent_s = SYN_S[tries] if tries < len(SYN_S) else DIAL_DEADLINE_S
        self.at(began_s + sent_s + 4 * self.one_way(node, other), answer)

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
        """End the session: what `a` has queued still arrives, then both cores get `PeerDown`."""
        session = a.sessions[b.key.public]

        def end(node: Node, other: Node) -> None:
            if node.sessions.get(other.key.public) == session:
                del node.sessions[other.key.public]
                node.flows.pop(other.key.public, None)
                self._apply(node, PeerDown(other.key.public))

        if a.alive:
            self.at(self.now, end, a, b)
        else:
            del a.sessions[b.key.public]
        # Not before the last message arrives: `_do_send` adds the time that the receiver takes to read it.
        self.at(self.now + b.cpu.costs.message_s + self.one_way(a, b), end, b, a)

    # ------------------------------------------------------------ bulk

    def _flow(self, node: Node, peer: bytes) -> Flow | None:
        """Return the flow of bulk data to `peer`; None without a session."""
        session = node.sessions.get(peer)
        if session is None:
            return None
        flow = node.flows.get(peer)
        if flow is None or flow.session != session:
            other = self.nodes[peer]
            flow = node.flows[peer] = Flow(node, other, session, self.one_way(node, other), self.paths)
        return flow

    def _frame_arrived(self, flow: Flow, frame: Frame) -> None:
        """A frame has reached its receiver. It is ignored if the session has ended."""
        node, to = flow.node, flow.to
        if not to.alive or to.sessions.get(node.key.public) != flow.session:
            return
        if self.cuts and self._is_cut(node, to):
            self._held_up.append((node, to, flow.session, self._frame_arrived, (flow, frame)))
        elif to.frozen:
            to.later.append((self._frame_arrived, (flow, frame)))
        else:
            self.uplinks.taken(flow, frame)
            frame.arrive(*frame.args)

    def _do_sendheader(self, node: Node, effect: SendHeader) -> None:
        flow, header = self._flow(node, effect.peer), node.headers.get(effect.key)
        if flow is None:
            return
        done = SendDone(effect.peer, effect.stripe, effect.key, -1, effect.pull)
        if header is None:  # dropped since the core decided: nothing is sent
            self.soon(self._apply, node, done)
            return
        size = header.header_bytes
        stored = HeaderStored(node.key.public, effect.stripe, *facts(header))
        frame = Frame(wire_bytes(size), size, done, self._header_arrived, (flow.to, stored))
        self.uplinks.send(flow, frame, pull=effect.pull)

    def _do_sendpiece(self, node: Node, effect: SendPiece) -> None:
        peer, stripe, key, index = effect.peer, effect.stripe, effect.key, effect.index
        flow = self._flow(node, peer)
        if flow is None:
            return
        done = SendDone(peer, stripe, key, index, effect.pull)
        if not node.pieces.get(key, 0) >> index & 1:
            self.soon(self._apply, node, done)
            return
        size = node.headers[key].piece_bytes[index]
        stored = PieceStored(node.key.public, stripe, key, index, size)
        frame = Frame(wire_bytes(size), size, done, self._piece_arrived, (flow.to, stored))
        self.uplinks.send(flow, frame, pull=effect.pull)

    def _header_arrived(self, node: Node, event: HeaderStored) -> None:
        known, version = event.key in node.headers, _version_of(event.key)
        arrival = header_arrival(version, node.applied, known=known, same=known)
        if arrival is Arrival.STRAY:
            self._apply(node, Stray(event.peer or b"", event.stripe, event.header_bytes))
            return
        if arrival is Arrival.NEW:
            node.headers[event.key] = event
            node.pieces[event.key] = 0
            node.cpu.charge(self.now, node.cpu.costs.verify_s)
        self._apply(node, event)

    def _piece_arrived(self, node: Node, event: PieceStored) -> None:
        key, size = event.key, event.size_bytes
        have, bit, giver, version = node.pieces.get(key), 1 << event.index, event.peer or b"", _version_of(key)
        here, dropped = bool((have or 0) & bit), (version, key.attempt) in node.dropped
        arrival = piece_arrival(
            version, node.applied, known=have is not None, bodiless=False, here=here, dropped=dropped
        )
        if have is None or arrival in (Arrival.STRAY, Arrival.WRONG):
            bad = PieceBad(giver, "piece before its header")
            self._apply(node, bad if arrival is Arrival.WRONG else Stray(giver, event.stripe, size))
            return
        node.received_bytes += size
        if arrival is Arrival.DUPLICATE:
            node.duplicate_bytes += size
        node.pieces[key] = have | bit
        self._apply(node, event)

    # ------------------------------------------------------------ blobs and blocks

    def _do_sendblob(self, node: Node, effect: SendBlob) -> None:
        known = effect.name in node.lists if effect.kind == Blob.HASHES else node.root != b""
        self._answer(node, effect.peer, effect.request, self.blocks * 32, known)

    def _do_sendblock(self, node: Node, effect: SendBlock) -> None:
        self._answer(node, effect.peer, effect.request, self.block_bytes, node.root != b"")

    def _answer(self, node: Node, peer: bytes, request: int, size: int, known: bool) -> None:
        if not known:
            self._do_send(node, Send(peer, Lacks(request)))
            return
        flow = self._flow(node, peer)
        if flow is not None:
            label = node.core.state.held or VersionId(0, 0)
            gave = Gave(peer, size)
            frame = Frame(wire_bytes(size), size, gave, self._parts_arrived, (flow.to, node, request, label, size))
            self.uplinks.send(flow, frame, pull=True)

    def _parts_arrived(self, node: Node, giver: Node, request: int, label: VersionId, size: int) -> None:
        asked = node.asked.pop(request, None)
        if asked is None:
            return
        _, kind, name = asked
        event: Event
        if kind == Blob.HASHES:
            node.lists.add(name)
            of = next(v for v in [VersionId(0, 0), *self.versions] if root_of(v) == name)
            differs = tuple(range(self.blocks)) if node.root != name else ()
            event = PartsDone(giver.key.public, request, of, differs, size_bytes=size)
        elif kind == 0 and root_of(label) not in node.lists:
            event = UnknownLabel(giver.key.public, request, label)
        else:
            if kind == 0:
                node.labels[name] = label
            event = PartsDone(giver.key.public, request, label, size_bytes=size)
        self._apply(node, event)

    # ------------------------------------------------------------ jobs, disk, timers, notices

    def _do_run(self, node: Node, effect: Run) -> None:
        self.at(node.workers.charge(self.now, self.job_s), self._job_done, node, effect.job)

    def _job_done(self, node: Node, job: Job) -> None:
        self._apply(node, JobDone(job, *self._work(node, job)))

    def _work(self, node: Node, job: Job) -> tuple[bool, Any]:
        if job.kind == JobKind.OPEN:
            return True, Opened(node.root, node.root == b"")
        if job.kind == JobKind.STAGE:
            assert job.key is not None
            header = node.headers[job.key]
            whole = node.pieces[job.key] == (1 << len(header.piece_bytes)) - 1
            return whole and header.parent_root == node.root, (0,)
        version = node.core.state.chunks.version(job.version)
        if job.kind == JobKind.APPLY:
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

        self.at(self.now + 0.001, durable)

    def _do_settimer(self, node: Node, effect: SetTimer) -> None:
        node.timers[effect.name] = effect.at
        self.at(effect.at, self._timer, node, effect.name, effect.at)

    def _timer(self, node: Node, name: str, at: float) -> None:
        if node.timers.get(name) == at:
            self._apply(node, Timer(name))

    def _do_drop(self, node: Node, effect: Drop) -> None:
        if effect.attempt is not None:
            node.dropped.add((effect.version, effect.attempt))
        for key in [k for k in node.headers if (k.epoch, k.version) == effect.version]:
            if effect.attempt is None or key.attempt == effect.attempt:
                del node.headers[key], node.pieces[key]

    def _do_versionapplied(self, node: Node, effect: VersionApplied) -> None:
        node.held_at[effect.version], node.applied = self.now, effect.version
        self.committed(node, effect.version)

    def _do_announce(self, node: Node, effect: Announce) -> None:
        """Gossip: every connected member gets the manifest after a delay."""
        seen = ManifestSeen(effect.manifest)
        for peer in sorted(node.sessions):
            other = self.nodes[peer]
            if isinstance(other.core, Peer):
                self._carry(node, other, node.sessions[peer], _GOSSIP_AFTER_S, self._apply, other, seen)

    def _do_notify(self, node: Node, effect: Notify) -> None:
        self.on_notice(node, effect.notice)


def _version_of(key: ChunkKey) -> VersionId:
    return VersionId(key.epoch, key.version)


_NAMES: dict[type, bytes] = {kind: kind.__name__.encode() for kind in (Heard, HeaderStored, PieceStored, SendDone)}
_DO: dict[type, Callable[[VirtualNetwork, Node, Any], None]] = {
    kind: getattr(VirtualNetwork, f"_do_{kind.__name__.lower()}")
    for kind in (
        Announce, Close, VersionApplied, Dial, Drop, Notify, Persist, Probe, Ready, Run, Send, SendBlob, SendBlock,
        SendHeader, SendPiece, SetTimer,
    )
}  # fmt: skip
