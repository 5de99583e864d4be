"""Catch-up: brings an empty, old or damaged replica to a version of the swarm, block by block, from many peers.

layout -> files -> open -> chain? -> hashes -> blocks -> replay

Each block arrives with a label, the version that its giver holds, and is checked against that version's list of block
hashes; the list is checked against a signed root. The swarm publishes versions meanwhile, so labels differ. The chunks
of these versions are stored from the start of the catch-up, and are then replayed onto the blocks with older labels. A
node whose folder holds one of the last R versions needs no blocks: it replays the versions since (`chain?`).
"""

from collections import deque

from codec import Manifest
from swarm.protocol.core.events import Job, JobDone, JobKind, Opened, PartsDone, Run, UnknownLabel, VersionApplied
from swarm.protocol.core.notices import CatchupFailed, CatchupPhaseEntered, CatchupStarted, CaughtUp, ReplicaDamaged
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Blob, WantBlob, WantBlock, WantManifest
from swarm.protocol.state import State
from swarm.protocol.transfer.catchup_phases import Phase, PhaseCause, next_phase
from swarm.protocol.transfer.catchup_requests import BLOCK, Request, Unlisted
from swarm.protocol.transfer.givers import Givers
from swarm.protocol.transfer.sources import block_sources

__all__ = ["Catchup", "Phase"]

SLOW_TIMES = 4
"""A giver is slow if its last block took more than this many times as long as the fastest giver's. Four requests queued
at one giver may differ by that factor."""
SLOW_S = 1.0
"""A block that came within this time is never slow."""
OVERTAKE_TIMES = 2
"""Once all blocks are requested, one that is awaited this many times as long as an idle giver's last block took is
requested from that giver too."""


class Catchup:
    """Brings the replica to a version."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.phase = Phase.IDLE
        self._target: Manifest | None = None
        self._sealed_target = b""
        self._layout: bytes | None = None
        """The hash of our replica's layout; None without a replica."""
        self._requests: dict[int, Request] = {}
        self._next_request = 1
        self._wanted: deque[tuple[int, bytes]] = deque()
        """Blobs still to request: (kind, name)."""
        self._missing_blocks: deque[int] = deque()
        self._labels: dict[int, VersionId] = {}
        """The label of each block that we have."""
        self._lists: set[VersionId] = set()
        self._unlisted: dict[VersionId, list[Unlisted]] = {}
        self._total = 0
        self._replaying: VersionId | None = None
        self._chain_until = 0.0
        self._turn = 0
        self._lacking: dict[bytes, set[bytes]] = {}
        """By blob name (b"" for blocks): the peers that lack it or did not answer."""
        self._took: dict[bytes, float] = {}
        """By giver: seconds that its last block took, or the time limit if the block did not come."""
        self._alone_until = 0.0
        """Local time until which the authority is not asked, since other members may be reached first."""
        self._nobody_has = False
        """Whether all peers were asked for something, and all lacked it."""
        self._rest_until = 0.0
        """Local time until which no peer is asked, after all lacked something."""
        self._seals_asked: dict[VersionId, float] = {}
        """The labels whose manifests were requested, and the local time of the request."""
        self._overtaken: set[int] = set()
        """Blocks that were requested from a second giver while the first had not answered yet."""
        self._waits_since: dict[VersionId, float] = {}
        """By version without which the replay does not go on: the local time at which the waiting began."""
        self._givers = Givers(state)

    @property
    def active(self) -> bool:
        return self.phase is not Phase.IDLE

    @property
    def fraction(self) -> float:
        """The share of the differing blocks that we have, 0 to 1; 1 when idle."""
        if not self.active:
            return 1.0
        return len(self._labels) / self._total if self._total else 0.0

    @property
    def total_blocks(self) -> int:
        """How many blocks differ, and are fetched; 0: not known yet."""
        return self._total

    def has_layout(self, layout_hash: bytes) -> None:
        """Our replica already has this layout."""
        self._layout = layout_hash

    def start(self, target: Manifest, sealed: bytes, now: float) -> None:
        """Start a catch-up to this version, or restart with it as the target.

        Chunks of later versions are stored from now on.
        """
        state = self._state
        self._clear()
        self._target, self._sealed_target = target, sealed
        self._alone_until = now + state.tuning.pull_deadline_s
        self._givers.start()
        state.held = None
        state.floor = VersionId(target.epoch, target.version)
        state.outbox.notify(CatchupStarted(state.floor, target.root))
        if self._layout == target.layout_hash:
            self._want_hashes(PhaseCause.LAYOUT_KNOWN)
        else:
            self._go_on(PhaseCause.LAYOUT_UNKNOWN)
            self._wanted = deque([(Blob.LAYOUT, target.layout_hash)])
        self.tick(now)

    def _clear(self) -> None:
        """Forget all of the last catch-up but the layout."""
        self._target, self._sealed_target = None, b""
        for each in (self._requests, self._wanted, self._missing_blocks, self._labels, self._lists, self._unlisted,
                     self._lacking, self._took, self._seals_asked, self._overtaken, self._waits_since):  # fmt: skip
            each.clear()
        self._nobody_has = False
        self._rest_until = 0.0
        self._total = 0
        self._replaying = None

    def repair(self, now: float) -> None:
        """Start a catch-up to the version that we hold, to fetch its damaged blocks."""
        manifest: Manifest | None = self._state.manifest
        if manifest is not None and not self.active:
            self.start(manifest, self._state.sealed_manifest, now)

    # ------------------------------------------------------------ answers

    def parts_done(self, event: PartsDone, now: float) -> None:
        request = self._requests.pop(event.request, None)
        if request is None or request.peer != event.peer:
            return
        if request.kind == BLOCK and event.label < self._state.floor:  # older than the first version that is replayed
            self._lacking.setdefault(request.name, set()).add(event.peer)
            self._missing_blocks.append(request.block)
        elif request.kind == BLOCK:
            self._labels[request.block] = event.label
            self._took[event.peer] = now - (request.deadline - self._state.tuning.request_deadline_s)
        elif request.kind == Blob.LAYOUT:
            self._wanted = deque((Blob.FILE, name) for name in event.needs)
            self._go_on(PhaseCause.LAYOUT_STORED)
        elif request.kind == Blob.HASHES:
            self._requests = {n: r for n, r in self._requests.items() if r.name != request.name}
            self._wanted = deque(each for each in self._wanted if each[1] != request.name)
            self._listed(event)
        self.tick(now)

    def unknown_label(self, event: UnknownLabel, now: float) -> None:
        """The giver holds a version whose hash list we lack: fetch its manifest and list, then ask again."""
        request = self._requests.pop(event.request, None)
        if request is None or request.peer != event.peer:
            return
        if event.label in self._lists:
            self._missing_blocks.append(request.block)
        elif event.label <= self._state.floor:  # older than the first version that is replayed
            self._lacking.setdefault(request.name, set()).add(event.peer)
            self._missing_blocks.append(request.block)
        else:
            deadline = now + self._state.tuning.request_deadline_s
            self._unlisted.setdefault(event.label, []).append(Unlisted(request.block, event.peer, deadline))
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
        self._queue_again(request)
        self.tick(now)

    def lost(self, peer: bytes, now: float) -> None:
        """The session with `peer` is gone: request from others what it was to bring."""
        for number in [n for n, r in self._requests.items() if r.peer == peer]:
            self._queue_again(self._requests.pop(number))
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

    # ------------------------------------------------------------ phases

    def tick(self, now: float) -> None:
        """Repeat overdue requests, enter the next phase if the current one is finished, and send new requests."""
        if not self.active or self._restarted(now):
            return
        for number in [n for n, r in self._requests.items() if now >= r.deadline]:
            request = self._requests.pop(number)
            self._lacking.setdefault(request.name, set()).add(request.peer)  # ask others first, if there are any
            if request.kind == BLOCK:
                self._took[request.peer] = self._state.tuning.request_deadline_s
            self._queue_again(request)
        self._ask_for_lists_again(now)
        if self.phase is Phase.FILES and not self._wanted and not self._requests:
            assert self._target is not None
            self._go_on(PhaseCause.FILES_STORED)
            self._state.outbox.emit(Run(Job(JobKind.OPEN, self._state.floor, name=self._target.layout_hash)))
        if self.phase is Phase.CHAIN:
            self._look_for_chain(now)
        if self.phase is Phase.BLOCKS:
            self._give_up_labels(now)
            self._ask_for_lists(now)
            self._find_givers(now)
            if not self._missing_blocks and not self._requests and not self._unlisted and not self._wanted:
                self._go_on(PhaseCause.BLOCKS_STORED)
        if self.phase is Phase.REPLAY:
            self._replay()
        self._fill(now)

    def _restarted(self, now: float) -> bool:
        """Restart with the newest sealed version if the target is obsolete; whether it was.

        It is obsolete if the authority rolled back and began a new epoch, or if the swarm has moved on so far that no
        peer has the target's block hashes, or the chunks of the next version to replay.
        """
        sealed = [v for v in self._state.chunks.versions.values() if v.manifest is not None]
        newest = max(sealed, key=lambda v: v.id, default=None)
        floor = self._state.floor
        if newest is None or newest.manifest is None or newest.id <= floor:
            return False
        gone = (self.phase is Phase.HASHES and self._nobody_has) or self._nobody_keeps(newest.id, now)
        if newest.id.epoch == floor.epoch and not gone:
            return False
        self.start(newest.manifest, newest.sealed_manifest, now)
        return True

    def _nobody_keeps(self, newest: VersionId, now: float) -> bool:
        """Whether the replay waits for a version whose chunks others have dropped, while `newest` is the newest, or
        whose seal nobody has brought for long: others may have caught up without it."""
        if self.phase is not Phase.REPLAY or self._replaying is not None:
            return False
        floor, tuning = self._state.floor, self._state.tuning
        awaited = VersionId(floor.epoch, floor.version + 1)
        following = self._state.chunks.version(awaited)
        kept = newest.version - floor.version <= tuning.retain_versions
        if following is not None and (following.complete or (kept and following.manifest is not None)):
            return False
        since = self._waits_since.setdefault(awaited, now)
        return not kept or now - since > 3 * tuning.pull_deadline_s

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
        """A manifest of an older version arrived. If our folder holds it, only the versions since are missing."""
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
            self._missing_blocks = deque(event.differs)
            self._total = len(event.differs)
            self._go_on(PhaseCause.COMPARED)
        self._missing_blocks.extend(waiting.block for waiting in self._unlisted.pop(event.label, ()))

    def _give_up_labels(self, now: float) -> None:
        """Request from others the blocks for whose labels no hash list has come in time."""
        for label, waiting in list(self._unlisted.items()):
            late = [block for block in waiting if now >= block.deadline]
            for block in late:
                self._lacking.setdefault(b"", set()).add(block.peer)
                self._missing_blocks.append(block.block)
            self._unlisted[label] = [block for block in waiting if now < block.deadline]
            if not self._unlisted[label]:
                del self._unlisted[label]
                self._seals_asked.pop(label, None)

    def _ask_for_lists(self, now: float) -> None:
        """Request the hash lists of the labels that we lack, once their manifests are here."""
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

    def _ask_for_lists_again(self, now: float) -> None:
        """Request a hash list from a second member if the first does not answer soon: much else may be queued there for
        us. The first answer counts."""
        tuning = self._state.tuning
        asked = [request for request in self._requests.values() if request.kind == Blob.HASHES]
        for request in asked:
            once = sum(other.name == request.name for other in asked) == 1
            if once and now - (request.deadline - tuning.request_deadline_s) > tuning.pull_after_s:
                useless = {self._state.swarm, request.peer} | self._lacking.get(request.name, set())
                others = [peer for peer in block_sources(self._state) if peer not in useless]
                if others:
                    self._turn += 1
                    peer = others[self._turn % len(others)]
                    number = self._note(peer, request.kind, request.name, 0, now)
                    self._state.outbox.send(peer, WantBlob(number, request.kind, request.name, 0))

    def _replay(self) -> None:
        """Run REPLAY for one version after another, up to the newest label; each needs all its chunks."""
        if self._replaying is not None:
            return
        state = self._state
        last = max(self._labels.values(), default=state.floor)
        at = state.floor
        if last > at:
            at = VersionId(at.epoch, at.version + 1)
            version = state.chunks.version(at)
            if version is None or not version.complete:
                return  # pushes and pulls bring the missing chunks
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
            self._missing_blocks = deque(bad)
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
        self._givers.release()
        self._state.set_held(id_, manifest, sealed)
        self._state.outbox.emit(VersionApplied(id_, manifest))
        self._state.outbox.notify(CaughtUp(id_, len(self._labels)))
        self._clear()

    def _queue_again(self, request: Request) -> None:
        if request.kind == BLOCK:
            self._missing_blocks.append(request.block)
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
        while self.phase is Phase.BLOCKS and self._missing_blocks and len(self._requests) < tuning.requests_in_flight:
            peer = self._pick(b"", now)
            if peer is None:
                return
            block = self._missing_blocks.popleft()
            number = self._note(peer, BLOCK, b"", block, now)
            self._state.outbox.send(peer, WantBlock(number, block))

    def _note(self, peer: bytes, kind: int, name: bytes, block: int, now: float) -> int:
        number = self._next_request
        self._next_request = (number + 1) & 0x7FFFFFFF
        self._requests[number] = Request(peer, kind, name, block, now + self._state.tuning.request_deadline_s)
        return number

    def _pick(self, name: bytes, now: float) -> bytes | None:
        """The next source that is not known to lack this and has room; the authority only if there is no other."""
        if now < self._rest_until:
            return None
        lacking = self._lacking.get(name, set())
        sources = [p for p in block_sources(self._state) if p not in lacking]
        if not sources and lacking:
            self._nobody_has = True
            self._lacking.pop(name, None)  # all were asked once: they may have it after a pause
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

    def _find_givers(self, now: float) -> None:
        """While blocks are left to request: dial members if few of our neighbours have blocks and are not slow. Then:
        have idle givers send blocks that slow ones hold up."""
        useless = {self._state.swarm} | self._lacking.get(b"", set())
        have = [p for p in block_sources(self._state) if p not in useless]
        if self._missing_blocks:
            self._givers.dial_more(len(have) - len(self._slow(have, now)), len(self._missing_blocks), now)
        else:
            self._overtake(have, now)

    def _overtake(self, givers: list[bytes], now: float) -> None:
        """Request the blocks that are awaited longest from givers that have nothing left to send us, each block once.
        Only the answer to the newest request for a block counts (`swarm/runtime/sessions/blob_service.py`)."""
        busy = {request.peer for request in self._requests.values()}
        idle = sorted((self._took[p], p) for p in givers if p in self._took and p not in busy)
        first = {n: r for n, r in self._requests.items() if r.kind == BLOCK and r.block not in self._overtaken}
        awaited = sorted((request.deadline, number) for number, request in first.items())
        for (took_s, peer), (deadline, number) in zip(idle, awaited, strict=False):
            waited_s, block = now - (deadline - self._state.tuning.request_deadline_s), first[number].block
            if waited_s > max(SLOW_S, OVERTAKE_TIMES * took_s):
                self._overtaken.add(block)
                self._took[self._requests.pop(number).peer] = waited_s
                self._state.outbox.send(peer, WantBlock(self._note(peer, BLOCK, b"", block, now), block))

    def _slow(self, peers: list[bytes], now: float) -> set[bytes]:
        """The givers that are much slower than the fastest of `peers`.

        Each gets one request at a time, and all together less than half of the requests in flight.
        """
        took = {p: self._took[p] for p in peers if p in self._took}
        bound = max(SLOW_S, SLOW_TIMES * min(took.values())) if took else self._state.tuning.request_deadline_s
        for request in self._requests.values():  # count a request that is not answered yet
            if request.kind == BLOCK and request.peer in peers:
                waited_s = now - (request.deadline - self._state.tuning.request_deadline_s)
                took[request.peer] = max(took.get(request.peer, 0.0), waited_s)
        return {p for p, took_s in took.items() if took_s > bound}

    def _has_company(self) -> bool:
        """Whether the roster names other members."""
        roster = self._state.roster
        return roster is not None and any(m.peer != self._state.key.public for m in roster.members)
