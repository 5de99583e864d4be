"""What each version changed, from its seal until the runtime has confirmed it and the ledger hears of it."""

from collections.abc import Iterator
from contextlib import contextmanager

from codec.parts import Part
from node.coordinator.adapters import AdaptersHeld
from node.ledger.part_history import Change
from swarm.protocol.core.events import VersionId

__all__ = ["VersionChanges"]


class VersionChanges:
    """A version is confirmed by another task than the one that seals it: while that one still waits, or after it has
    begun the next version. The configurations of adapters are read before the replica can be at another version."""

    def __init__(self, held: AdaptersHeld) -> None:
        self._held = held
        self._sealing: tuple[VersionId, frozenset[Part]] | None = None
        self._found: dict[VersionId, Change] = {}
        """Of the versions that are sealed, and not confirmed."""

    @contextmanager
    def sealing(self, version: VersionId, parts: frozenset[Part]) -> Iterator[None]:
        """Within it the version is sealed and applied to the replica; no other one before it ends."""
        self._sealing = version, parts
        try:
            yield
            if self._sealing is not None:
                self._found[version] = self._held.change(parts)
        finally:
            self._sealing = None

    def confirmed(self, version: VersionId) -> Change:
        """What `version` changed; everything, if this process did not seal it. To be called once for each version."""
        if (found := self._found.pop(version, None)) is not None:
            return found
        parts = None
        if self._sealing is not None and self._sealing[0] == version:
            parts, self._sealing = self._sealing[1], None
        return self._held.change(parts)
