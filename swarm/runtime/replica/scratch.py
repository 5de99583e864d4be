"""What is decoded and waits for its version's seal. Worker threads put it there, several at a time."""

import threading

from codec import ChunkKey, Staged
from swarm.protocol.core.events import VersionId

__all__ = ["Scratch"]


class Scratch:
    """At most about `most_bytes`, counted in `nbytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._staged: dict[VersionId, dict[int, Staged]] = {}
        self.nbytes = 0

    @property
    def full(self) -> bool:
        return self.nbytes >= self._most_bytes

    def put(self, key: ChunkKey, staged: Staged) -> None:
        with self._lock:
            self._staged.setdefault(VersionId(key.epoch, key.version), {})[key.seq] = staged
            self.nbytes += staged.nbytes

    def get(self, key: ChunkKey) -> Staged | None:
        return self._staged.get(VersionId(key.epoch, key.version), {}).get(key.seq)

    def drop(self, version: VersionId) -> None:
        """What was staged of this version is of no use any more."""
        with self._lock:
            dropped = self._staged.pop(version, {})
            self.nbytes -= sum(staged.nbytes for staged in dropped.values())

    def drop_up_to(self, version: VersionId | None) -> None:
        """Of this version and all before it; None: of all."""
        with self._lock:
            versions = list(self._staged)
        for each in versions:
            if version is None or each <= version:
                self.drop(each)
