"""From nothing, from an old folder or from damage to a version that the swarm holds, block by block, from many peers.

layout -> files -> open -> chain? -> hashes -> blocks -> replay

Every block that arrives is labelled with the version that its giver holds, and is checked against that version's list
of block hashes (which itself adds up to a signed root). The swarm moves on while we fetch, so labels differ; the chunks
of the versions since, which we store from our first minute, are then replayed onto the blocks whose label is older. A
node whose folder is one of the last R versions needs no blocks at all: it replays the chain (`chain?`).
"""

from collections import deque
from dataclasses import dataclass

from codec import Manifest
from swarm.protocol.core.events import Commit, Job, JobDone, JobKind, Opened, PartsDone, Run, UnknownLabel
from swarm.protocol.core.notices import CatchupFailed, CatchupPhaseEntered, CatchupStarted, CaughtUp, ReplicaDamaged
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Blob, WantBlob, WantBlock, WantManifest
from swarm.protocol.state import State
from swarm.protocol.transfer.catchup_phases import Phase, PhaseCause, next_phase
from swarm.protocol.transfer.sources import block_sources

__all__ = ["Catchup", "Phase"]

SLOW_TIMES = 4
"""A giver whose last block took more than this many times as long as the fastest giver's is slow. Four requests that
queue at one giver may differ by as much."""
SLOW_S = 1.0
"""A block that came within this time is never slow."""

BLOCK = 0
"""`_Request.kind` of a block; the others are `Blob` kinds."""


@dataclass(slots=True)
class _Request:
    """Something asked of one peer."""

    peer: bytes
    kind: int
    name: bytes
    block: int
    deadline: float


@dataclass(frozen=True, slots=True)
class _Unlisted:
    """A block that a peer sent under the label of a version whose block hashes we lack."""

    block: int
    peer: bytes
    deadline: float
    """The block is asked of another peer after this: nobody signs a label, so there may be no such version."""


class Catchup:
    """Brings the replica to a version."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.phase = Phase.IDLE
        self._target: Manifest | None = None
        self._sealed_target = b""
        self._layout: bytes | None = None
        """Hash of the layout that our replica has."""
        self._requests: dict[int, _Request] = {}
        self._next_request = 1
        self._wanted: deque[tuple[int, bytes]] = deque()
        """Blobs still to ask for: (kind, name)."""
        self._todo: deque[int] = deque()
        self._labels: dict[int, VersionId] = {}
        self._lists: set[VersionId] = set()
        self._unlisted: dict[VersionId, list[_Unlisted]] = {}
        self._total = 0
        self._replaying: VersionId | None = None
        self._chain_until = 0.0
        self._turn = 0
        self._lacking: dict[bytes, set[bytes]] = {}
        """Which peers lack what, or did not answer (by blob name, or b"" for blocks)."""
        self._took: dict[bytes, float] = {}
        """By giver: how long its last block took, or its deadline if the block did not come."""
        self._alone_until = 0.0
        """Until then the authority is not asked, for others may yet be reached."""
        self._nobody_has = False
        """Everybody was asked for something, and lacked it."""
        self._rest_until = 0.0
        """Everybody was asked and nobody had it: not before then are they asked again."""
        self._seals_asked: dict[VersionId, float] = {}
        """Manifests of labels that we asked for, and when."""

    @property
    def active(self) -> bool:
        return self.phase is not Phase.IDLE

    @property
    def fraction(self) -> float:
        """How much of the blocks that differ we have; 1 when idle."""
        if not self.active:
            return 1.0
        return len(self._labels) / self._total if self._total else 0.0

    def has_layout(self, layout_hash: bytes) -> None:
        """Our replica has this layout already."""
        self._layout = layout_hash

    def start(self, target: Manifest, sealed: bytes, now: float) -> None:
        """Aim at this version. Chunks of later ones are stored from now on."""
        state = self._state
        self._target, self._sealed_target = target, sealed
        self._requests.clear()
        self._labels.clear()
        self._lists.clear()
        self._unlisted.clear()
        self._lacking.clear()
        self._took.clear()
        self._seals_asked.clear()
        self._todo.clear()
        self._nobody_has = False
        self._rest_until = 0.0
        self._alone_until = now + state.tuning.pull_deadline_s
        self._total = 0
        self._replaying = None
        state.held = None
        state.floor = VersionId(target.epoch, target.version)
        state.outbox.notify(CatchupStarted(state.floor, target.root))
        if self._layout == target.layout_hash:
            self._want_hashes(PhaseCause.LAYOUT_KNOWN)
        else:
            self._go_on(PhaseCause.LAYOUT_UNKNOWN)
            self._wanted = deque([(Blob.LAYOUT, target.layout_hash)])
        self.tick(now)

    def repair(self, now: float) -> None:
        """Some block is not what the version that we hold says: fetch what differs from it, and go on from there."""
        manifest: Manifest | None = self._state.manifest
        if manifest is not None and not self.active:
            self.start(manifest, self._state.sealed_manifest, now)

    # ------------------------------------------------------------ what arrives

    def parts_done(self, event: PartsDone, now: float) -> None:
        request = self._requests.pop(event.request, None)
        if request is None or request.peer != event.peer:
            return
        if request.kind == BLOCK and event.label < self._state.floor:  # nothing is replayed from that far back
            self._lacking.setdefault(request.name, set()).add(event.peer)
            self._todo.append(request.block)
        elif request.kind == BLOCK:
            self._labels[request.block] = event.label
            self._took[event.peer] = now - (request.deadline - self._state.tuning.request_deadline_s)
        elif request.kind == Blob.LAYOUT:
            self._wanted = deque((Blob.FILE, name) for name in event.needs)
            self._go_on(PhaseCause.LAYOUT_STORED)
        elif request.kind == Blob.HASHES:
            self._listed(event)
        self.tick(now)

    def unknown_label(self, event: UnknownLabel, now: float) -> None:
        """The giver has moved on to a version whose list we lack: get its manifest, then its list, then ask again."""
        request = self._requests.pop(event.request, None)
        if request is None or request.peer != event.peer:
            return
        if event.label in self._lists:
            self._todo.append(request.block)
        elif event.label <= self._state.floor:  # it is further back than we mean to be
            self._lacking.setdefault(request.name, set()).add(event.peer)
            self._todo.append(request.block)
        else:
            deadline = now + self._state.tuning.request_deadline_s
            self._unlisted.setdefault(event.label, []).append(_Unlisted(request.block, event.peer, deadline))
            self._want_seal(event.label, event.peer, now)
        self.tick(now)

    def _want_seal(self, label: VersionId, peer: bytes, now: float) -> None:
        version = self._state.chunks.version(label)
        if version is None or version.manifest is None:
            self._seals_asked[label] = now
            self._state.outbox.send(peer, WantManifest(label.epoch, label.version))

    def lacks(self, peer: bytes, number: int, now: float) -> None:
        request = self._requests.pop(number, None)
        if request is None or request.peer != peer:
            return
        self._lacking.setdefault(request.name, set()).add(peer)
        self._again(request)
        self.tick(now)

    def lost(self, peer: bytes, now: float) -> None:
        """The session with `peer` is gone: ask others for what it was to bring."""
        for number in [n for n, r in self._requests.items() if r.peer == peer]:
            self._again(self._requests.pop(number))
        if self.active:
            self.tick(now)

    def done(self, event: JobDone, now: float) -> None:
        """An OPEN or REPLAY has ended."""
        if not self.active or self._target is None:
            return
        if event.job.kind == JobKind.OPEN and self.phase is Phase.OPEN:
            self._opened(event, now)
        elif event.job.kind == JobKind.REPLAY and event.job.version == self._replaying:
            self._replayed(event)
        self.tick(now)

    # ------------------------------------------------------------ what follows

    def tick(self, now: float) -> None:
        """Ask again what is overdue, go on to the next phase where one is finished, keep the pipes full."""
        if not self.active or self._restarted(now):
            return
        for number in [n for n, r in self._requests.items() if now >= r.deadline]:
            request = self._requests.pop(number)
            self._lacking.setdefault(request.name, set()).add(request.peer)  # others first, if there are any
            if request.kind == BLOCK:
                self._took[request.peer] = self._state.tuning.request_deadline_s
            self._again(request)
        if self.phase is Phase.FILES and not self._wanted and not self._requests:
            assert self._target is not None
            self._go_on(PhaseCause.FILES_STORED)
            self._state.outbox.emit(Run(Job(JobKind.OPEN, self._state.floor, name=self._target.layout_hash)))
        if self.phase is Phase.CHAIN:
            self._look_for_chain(now)
        if self.phase is Phase.BLOCKS:
            self._give_up_labels(now)
            self._ask_for_lists(now)
            if not self._todo and not self._requests and not self._unlisted and not self._wanted:
                self._go_on(PhaseCause.BLOCKS_STORED)
        if self.phase is Phase.REPLAY:
            self._replay()
        self._fill(now)

    def _restarted(self, now: float) -> bool:
        """What we aimed at is no more: the authority went back to an older version and on from there (a new epoch), or
        everyone has moved on so far that nobody has its block hashes."""
        sealed = [v for v in self._state.chunks.versions.values() if v.manifest is not None]
        newest = max(sealed, key=lambda v: v.id, default=None)
        floor = self._state.floor
        if newest is None or newest.manifest is None or newest.id <= floor:
            return False
        if newest.id.epoch == floor.epoch and not (self.phase is Phase.HASHES and self._nobody_has):
            return False
        self.start(newest.manifest, newest.sealed_manifest, now)
        return True

    def _go_on(self, cause: PhaseCause) -> None:
        self.phase = next_phase(self.phase, cause)
        if self.active:
            self._state.outbox.notify(CatchupPhaseEntered(self.phase.value))

    def _opened(self, event: JobDone, now: float) -> None:
        assert self._target is not None
        if not event.ok:
            self._state.outbox.notify(CatchupFailed(str(event.result)))
            self._go_on(PhaseCause.NOT_OPENED)
            return
        opened: Opened = event.result
        self._layout = self._target.layout_hash
        if opened.root == self._target.root:
            self._finish(PhaseCause.IS_TARGET, self._target, self._sealed_target)
            return
        newest = self._target.version
        older = range(max(0, newest - self._state.tuning.retain_versions), newest)
        if opened.empty or not older:
            self._want_hashes(PhaseCause.NO_CHAIN)
            return
        self._root = opened.root
        self._chain_until = now + self._state.tuning.pull_deadline_s
        self._go_on(PhaseCause.PERHAPS_OLDER)
        for source in block_sources(self._state)[:1]:
            for number in older:
                self._state.outbox.send(source, WantManifest(self._target.epoch, number))

    def chain_manifest(self, manifest: Manifest, sealed: bytes, now: float) -> None:
        """A manifest of an older version: when it is what our folder holds, the chain from it is all we need."""
        if self.phase is Phase.CHAIN and manifest.root == self._root:
            state = self._state
            state.floor = VersionId(manifest.epoch, manifest.version)
            target, sealed_target = self._target, self._sealed_target
            self._finish(PhaseCause.CHAIN_FOUND, manifest, sealed)
            if target is not None:
                state.chunks.manifest(target, sealed_target, now)

    def _look_for_chain(self, now: float) -> None:
        if now >= self._chain_until:
            self._want_hashes(PhaseCause.CHAIN_NOT_FOUND)

    def _want_hashes(self, cause: PhaseCause) -> None:
        assert self._target is not None
        self._go_on(cause)
        self._wanted = deque([(Blob.HASHES, self._target.root)])

    def _listed(self, event: PartsDone) -> None:
        self._lists.add(event.label)
        if self.phase is Phase.HASHES:
            self._todo = deque(event.differs)
            self._total = len(event.differs)
            self._go_on(PhaseCause.COMPARED)
        self._todo.extend(each.block for each in self._unlisted.pop(event.label, ()))

    def _give_up_labels(self, now: float) -> None:
        """Ask others for the blocks whose label's list has not come in time."""
        for label, waiting in list(self._unlisted.items()):
            late = [each for each in waiting if now >= each.deadline]
            for each in late:
                self._lacking.setdefault(b"", set()).add(each.peer)
                self._todo.append(each.block)
            self._unlisted[label] = [each for each in waiting if now < each.deadline]
            if not self._unlisted[label]:
                del self._unlisted[label]
                self._seals_asked.pop(label, None)

    def _ask_for_lists(self, now: float) -> None:
        """Lists of versions that givers have moved on to, once their manifests are here."""
        sources = block_sources(self._state)
        for label, at in list(self._seals_asked.items()):
            if label in self._unlisted and sources and now - at > self._state.tuning.pull_deadline_s:
                self._turn += 1
                self._want_seal(label, sources[self._turn % len(sources)], now)
        asked = {name for kind, name in self._wanted} | {r.name for r in self._requests.values()}
        for label in self._unlisted:
            version = self._state.chunks.version(label)
            if version is not None and version.manifest is not None and version.manifest.root not in asked:
                self._wanted.append((Blob.HASHES, version.manifest.root))

    def _replay(self) -> None:
        """Run REPLAY for one version after the other, up to the newest label; each needs all of its chunks."""
        if self._replaying is not None:
            return
        state = self._state
        last = max(self._labels.values(), default=state.floor)
        at = state.floor
        if last > at:
            at = VersionId(at.epoch, at.version + 1)
            version = state.chunks.version(at)
            if version is None or not version.complete:
                return  # pushes and pulls bring them
        self._replaying = at
        state.outbox.emit(Run(Job(JobKind.REPLAY, at)))

    def _replayed(self, event: JobDone) -> None:
        state = self._state
        at = event.job.version
        self._replaying = None
        if not event.ok:
            bad = tuple(event.result)
            state.outbox.notify(ReplicaDamaged(at, f"{len(bad)} blocks"))
            for block in bad:
                self._labels.pop(block, None)
            self._todo = deque(bad)
            self._total = max(self._total, len(bad))
            self._go_on(PhaseCause.REPLAY_BAD)
            return
        version = state.chunks.version(at)
        if version is not None and version.manifest is not None:
            manifest, sealed = version.manifest, version.sealed_manifest
        else:
            assert self._target is not None
            manifest, sealed = self._target, self._sealed_target
        state.floor = at
        if at >= max(self._labels.values(), default=at):
            self._finish(PhaseCause.REPLAYED, manifest, sealed)

    def _finish(self, cause: PhaseCause, manifest: Manifest, sealed: bytes) -> None:
        id_ = VersionId(manifest.epoch, manifest.version)
        self._go_on(cause)
        self._requests.clear()
        self._state.settle(id_, manifest, sealed)
        self._state.outbox.emit(Commit(id_, manifest))
        self._state.outbox.notify(CaughtUp(id_, len(self._labels)))

    def _again(self, request: _Request) -> None:
        if request.kind == BLOCK:
            self._todo.append(request.block)
        else:
            self._wanted.append((request.kind, request.name))

    def _fill(self, now: float) -> None:
        tuning = self._state.tuning
        while self._wanted and len(self._requests) < tuning.requests_in_flight:
            kind, name = self._wanted[0]
            peer = self._pick(name, now)
            if peer is None:
                return
            self._wanted.popleft()
            number = self._note(peer, kind, name, 0, now)
            self._state.outbox.send(peer, WantBlob(number, kind, name, 0))
        while self.phase is Phase.BLOCKS and self._todo and len(self._requests) < tuning.requests_in_flight:
            peer = self._pick(b"", now)
            if peer is None:
                return
            block = self._todo.popleft()
            number = self._note(peer, BLOCK, b"", block, now)
            self._state.outbox.send(peer, WantBlock(number, block))

    def _note(self, peer: bytes, kind: int, name: bytes, block: int, now: float) -> int:
        number = self._next_request
        self._next_request = (number + 1) & 0x7FFFFFFF
        self._requests[number] = _Request(peer, kind, name, block, now + self._state.tuning.request_deadline_s)
        return number

    def _pick(self, name: bytes, now: float) -> bytes | None:
        """The next source that is not known to lack this and has room; the authority only when it is the only one."""
        if now < self._rest_until:
            return None
        lacking = self._lacking.get(name, set())
        sources = [p for p in block_sources(self._state) if p not in lacking]
        if not sources and lacking:
            self._nobody_has = True
            self._lacking.pop(name, None)  # everybody said no once: they may have it after a pause
            self._rest_until = now + self._state.tuning.pull_after_s
            return None
        others = [p for p in sources if p != self._state.swarm]
        if not others and not lacking and now < self._alone_until and self._has_company():
            return None
        others = others or sources
        busy = {p: sum(r.peer == p for r in self._requests.values()) for p in others}
        slow = self._slow(others, now)
        tuning = self._state.tuning
        room = sum(busy[p] for p in slow) < tuning.requests_in_flight // 2
        free = [p for p in others if (room and not busy[p] if p in slow else busy[p] < tuning.requests_per_peer)]
        if not free:
            return None
        self._turn += 1
        return min(free, key=lambda p: (p in slow, busy[p], (others.index(p) + self._turn) % len(others)))

    def _slow(self, peers: list[bytes], now: float) -> set[bytes]:
        """Givers that are much slower than the fastest of `peers`: each gets one request at a time, and only while all
        of them together have less than half of the window."""
        took = {p: self._took[p] for p in peers if p in self._took}
        bound = max(SLOW_S, SLOW_TIMES * min(took.values())) if took else self._state.tuning.request_deadline_s
        for request in self._requests.values():  # also one that has yet to answer
            if request.kind == BLOCK and request.peer in peers:
                waited_s = now - (request.deadline - self._state.tuning.request_deadline_s)
                took[request.peer] = max(took.get(request.peer, 0.0), waited_s)
        return {p for p, took_s in took.items() if took_s > bound}

    def _has_company(self) -> bool:
        """The roster names members beside us."""
        roster = self._state.roster
        return roster is not None and any(m.peer != self._state.key.public for m in roster.members)
