"""What the chunks of a version change, until its seal. Several worker threads put it there at a time."""

import threading

from codec import ChunkKey, StagedChunk
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.own import OwnChunk

__all__ = ["Scratch"]


class Scratch:
    """Holds about `max_bytes` at most, counted in `nbytes`; the caller looks at `full` before it adds more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._staged: dict[VersionId, dict[int, StagedChunk | OwnChunk]] = {}
        self.nbytes = 0

    @property
    def full(self) -> bool:
        """Whether there is no room for another chunk."""
        return self.nbytes >= self._max_bytes

    def put(self, key: ChunkKey, staged: StagedChunk | OwnChunk) -> None:
        """Keep what a chunk changes."""
        with self._lock:
            self._staged.setdefault(VersionId(key.epoch, key.version), {})[key.seq] = staged
            self.nbytes += staged.nbytes

    def get(self, key: ChunkKey) -> StagedChunk | OwnChunk | None:
        """What the chunk changes, if it is here."""
        return self._staged.get(VersionId(key.epoch, key.version), {}).get(key.seq)

    def drop(self, version: VersionId) -> None:
        """Forget the chunks of this version."""
        with self._lock:
            dropped = self._staged.pop(version, {})
            self.nbytes -= sum(staged.nbytes for staged in dropped.values())

    def drop_up_to(self, version: VersionId | None) -> None:
        """Forget the chunks of this version and of those before it; None: of all versions."""
        with self._lock:
            versions = list(self._staged)
        for known in versions:
            if version is None or known <= version:
                self.drop(known)
