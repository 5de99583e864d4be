"""What the seed remembers of each version for people: its size, when it was published and held by all, what it cost.

Bytes are counted at the seed's sockets from the begin of a publish until the last member reports the version, so that a
copy too many shows. A member that leaves or dies is not waited for.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from codec import Chunk, Manifest
from codec.experts import ExpertChanges, Experts
from node.ledger.assignment.commit_stats import Slowest
from node.status.schema import Step
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.own import OwnChunk

__all__ = ["Arrived", "SentBytes", "Track"]

KEPT: Final = 256
"""Versions remembered."""


class SentBytes(NamedTuple):
    """What the seed has sent since its start."""

    sockets: int
    payload: int
    control: int


class Arrived(NamedTuple):
    """A version that every member holds. `seconds`: since the begin of its publish."""

    version: VersionId
    nodes: int
    seconds: float


@dataclass(slots=True)
class _Tracked:
    """One version. `before`, `after`: sent at the begin of its publish, and when its last member reported it."""

    version: VersionId
    payload_bytes: int
    changed: int
    """Elements."""
    density: float
    """Changed elements by all elements."""
    began_at: float
    before: SentBytes
    after: SentBytes
    extract_s: float
    first_chunk_s: float | None
    trainer_step: int | None = None
    experts: int | None = None
    """Of the model; None: it has none."""
    experts_touched: int | None = None
    waiting: set[bytes] = field(default_factory=set)
    """Members that have not reported it."""
    held: int = 0
    """Members that have."""
    to_first_s: float | None = None
    to_half_s: float | None = None
    to_all_s: float | None = None


class Track:
    """The coordinator tells it what happens, with `sent()` to read the counters; the status reads it."""

    def __init__(self, sent: Callable[[], SentBytes], clock: Callable[[], float], experts: Experts) -> None:
        self._sent, self._clock = sent, clock
        self._experts = experts
        self._touched = ExpertChanges(experts)
        """Of the version that is being published."""
        self._versions: dict[VersionId, _Tracked] = {}
        self._began: tuple[float, SentBytes] | None = None
        self._first_chunk_at: float | None = None
        self.trainer_step: int | None = None
        """Of the version that is being published, or was last."""

    def begin_publish(self, trainer_step: int | None) -> None:
        """From here on bytes count towards the next version, which is of this step of the trainer."""
        self._began = (self._clock(), self._sent())
        self.trainer_step = trainer_step
        self._first_chunk_at = None
        self._touched = ExpertChanges(self._experts)

    def chunk_left(self, chunk: Chunk, known: OwnChunk | None) -> None:
        """A chunk of the open version was handed to the swarm. `known`: what it changes, if the trainer has said so."""
        if self._experts and chunk.opened is not None:
            positions = {} if known is None else {block.block: block.positions for block in known.blocks}
            for entry in chunk.opened.blocks:
                self._touched.add(entry.block, positions.get(entry.block))
        if self._first_chunk_at is None:
            self._first_chunk_at = self._clock()

    def sealed(self, manifest: Manifest, elements: int, members: Iterable[bytes]) -> None:
        """The open version is encoded and about to be sealed. `elements`: of the model. `members`: public keys of those
        that will get it."""
        began_at, before = self._began or (self._clock(), self._sent())
        self._began = None
        tracked = _Tracked(
            VersionId(manifest.epoch, manifest.version),
            manifest.payload_bytes,
            manifest.changed,
            density=manifest.changed / max(1, elements),
            began_at=began_at,
            before=before,
            after=self._sent(),
            extract_s=self._clock() - began_at,
            first_chunk_s=None if self._first_chunk_at is None else self._first_chunk_at - began_at,
            trainer_step=self.trainer_step,
            experts=self._experts.count if self._experts else None,
            experts_touched=self._touched.touched if self._experts else None,
            waiting=set(members),
        )
        self._versions[tracked.version] = tracked
        self._finish(tracked)
        while len(self._versions) > KEPT:
            del self._versions[next(iter(self._versions))]

    def held(self, peer: bytes, version: VersionId) -> list[Arrived]:
        """`peer` reported that it holds `version`, which includes all before it. Returns the versions that every member
        holds now, and did not before."""
        arrived = []
        for tracked in self._versions.values():
            if tracked.version <= version and peer in tracked.waiting:
                tracked.waiting.discard(peer)
                tracked.held += 1
                self._note_share(tracked)
                self._finish(tracked)
                if tracked.to_all_s is not None:
                    arrived.append(Arrived(tracked.version, tracked.held, tracked.to_all_s))
        return arrived

    def gone(self, peer: bytes) -> None:
        """`peer` is no member any more."""
        for tracked in self._versions.values():
            if peer in tracked.waiting:
                tracked.waiting.discard(peer)
                self._finish(tracked)

    def _note_share(self, tracked: _Tracked) -> None:
        """Note when the first member, and half of those that are still here, held the version."""
        age_s = self._clock() - tracked.began_at
        if tracked.to_first_s is None:
            tracked.to_first_s = age_s
        if tracked.to_half_s is None and tracked.held >= len(tracked.waiting):
            tracked.to_half_s = age_s

    def _finish(self, tracked: _Tracked) -> None:
        """Count what was sent, and the time if no member is missing, unless that was done before."""
        if tracked.to_all_s is None:
            tracked.after = self._sent()
            if not tracked.waiting and tracked.held:
                tracked.to_all_s = self._clock() - tracked.began_at

    def steps(self, slowest: Callable[[VersionId], Slowest]) -> list[Step]:
        """All remembered versions, oldest first. `slowest`: what a version took on the nodes' engines."""
        now = self._clock()
        return [_step(tracked, slowest(tracked.version), now) for tracked in self._versions.values()]


def _step(tracked: _Tracked, slowest: Slowest, now: float) -> Step:
    before, after = tracked.before, tracked.after
    return Step(
        version=tracked.version,
        density=tracked.density,
        bits_per_change=8 * tracked.payload_bytes / tracked.changed if tracked.changed else None,
        experts=tracked.experts,
        experts_touched=tracked.experts_touched,
        delta_bytes=tracked.payload_bytes,
        trainer_sent_bytes=after.sockets - before.sockets,
        trainer_control_bytes=after.control - before.control,
        trainer_copies=(after.payload - before.payload) / max(1, tracked.payload_bytes),
        first_chunk_s=tracked.first_chunk_s,
        extract_s=tracked.extract_s,
        publish_to_first_s=tracked.to_first_s,
        publish_to_half_s=tracked.to_half_s,
        publish_to_all_s=tracked.to_all_s,
        age_s=now - tracked.began_at,
        trainer_step=tracked.trainer_step,
        held=tracked.held,
        waiting=len(tracked.waiting),
        engines=slowest.engines,
        wait_s=slowest.wait_s,
        stage_s=slowest.stage_s,
        pause_s=slowest.pause_s,
        resume_s=slowest.resume_s,
    )
