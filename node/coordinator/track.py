"""What the seed remembers of each version for people: when it was published, when everybody had it, what it cost.

Bytes are those at the seed's sockets from the publish of a version until its last holder reported, so that a copy more
than needed shows. A member that leaves or dies is not waited for.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from codec import Manifest
from swarm.protocol.core.events import VersionId
from swarm.runtime import Counts
from swarm.transport.base import Traffic

__all__ = ["Track"]

KEPT: Final = 256
"""Versions remembered."""


@dataclass(slots=True)
class _Meter:
    """Bytes sent so far."""

    sockets: int
    payload: int
    control: int


@dataclass(slots=True)
class _Step:
    """One version. `density`: changed elements / all."""

    version: VersionId
    payload_bytes: int
    changed: int
    density: float
    at: float
    before: _Meter
    after: _Meter
    extract_s: float
    first_chunk_s: float | None
    waiting: set[bytes] = field(default_factory=set)
    held: int = 0
    to_all_s: float | None = None


class Track:
    """Fed by the seed's face; read by `status`, by `Swarm.state` and by the demo."""

    def __init__(self, traffic: Traffic, counts: Counts, clock: Callable[[], float]) -> None:
        self._traffic, self._counts, self._clock = traffic, counts, clock
        self._steps: dict[VersionId, _Step] = {}
        self._began: tuple[float, _Meter] | None = None
        self._first_chunk: float | None = None

    def _meter(self) -> _Meter:
        counts = self._counts
        return _Meter(self._traffic.sent, counts.pushed + counts.pulled + counts.blobs, counts.control_sent)

    def begin(self) -> None:
        """A publish begins: from here on bytes count towards it."""
        self._began = (self._clock(), self._meter())
        self._first_chunk = None

    def assigned(self) -> None:
        """A chunk of it has left."""
        if self._first_chunk is None:
            self._first_chunk = self._clock()

    def sealed(self, manifest: Manifest, elements: int, members: Iterable[bytes]) -> None:
        """All of it was extracted, of a model of so many elements, and it is about to be sealed. `members`: those that
        are to have it."""
        version = VersionId(manifest.epoch, manifest.version)
        at, before = self._began or (self._clock(), self._meter())
        self._began = None
        density = manifest.changed / max(1, elements)
        step = _Step(
            version,
            manifest.payload_bytes,
            manifest.changed,
            density,
            at,
            before,
            self._meter(),
            extract_s=self._clock() - at,
            first_chunk_s=None if self._first_chunk is None else self._first_chunk - at,
            waiting=set(members),
        )
        self._steps[version] = step
        self._finish(step)
        while len(self._steps) > KEPT:
            del self._steps[next(iter(self._steps))]

    def held(self, peer: bytes, version: VersionId) -> None:
        """`peer` reported that it holds `version`, and with it all before."""
        for step in self._steps.values():
            if step.version <= version and peer in step.waiting:
                step.waiting.discard(peer)
                step.held += 1
                self._finish(step)

    def gone(self, peer: bytes) -> None:
        for step in self._steps.values():
            if peer in step.waiting:
                step.waiting.discard(peer)
                self._finish(step)

    def _finish(self, step: _Step) -> None:
        if step.to_all_s is None:
            step.after = self._meter()
            if not step.waiting and step.held:
                step.to_all_s = self._clock() - step.at

    def steps(self) -> list[dict[str, Any]]:
        """Oldest first: `version`, `density`, `bits_per_change`, `delta_bytes` (F), `trainer_sent_bytes` (at the
        sockets), `trainer_control_bytes`, `trainer_copies` (payload sent / F), `publish_to_all_s`, `age_s` (since its
        publish began), `held` and `waiting` (numbers of members)."""
        now = self._clock()
        return [
            {
                "version": list(step.version),
                "density": step.density,
                "bits_per_change": 8 * step.payload_bytes / step.changed if step.changed else None,
                "delta_bytes": step.payload_bytes,
                "trainer_sent_bytes": step.after.sockets - step.before.sockets,
                "trainer_control_bytes": step.after.control - step.before.control,
                "trainer_copies": (step.after.payload - step.before.payload) / max(1, step.payload_bytes),
                "first_chunk_s": step.first_chunk_s,
                "extract_s": step.extract_s,
                "publish_to_all_s": step.to_all_s,
                "age_s": now - step.at,
                "held": step.held,
                "waiting": len(step.waiting),
            }
            for step in self._steps.values()
        ]

    def holders(self, version: VersionId) -> tuple[int, int]:
        """(members that hold it, members that it is waiting for)."""
        step = self._steps.get(version)
        return (0, 0) if step is None else (step.held, len(step.waiting))
