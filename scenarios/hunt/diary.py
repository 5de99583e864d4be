"""When things happened in a run, in virtual seconds: what availability is computed from."""

from dataclasses import dataclass, field

from swarm.protocol.core.version import VersionId

__all__ = ["Diary"]


@dataclass
class Diary:
    """Of one run."""

    sealed_s: dict[VersionId, float] = field(default_factory=dict)
    """By version: when it was first shown to anybody."""
    accepted_s: list[float] = field(default_factory=list)
    """When a rollout was accepted."""
    noticed_s: list[tuple[float, bytes]] = field(default_factory=list)
    """When somebody noticed that a machine, by its key, is gone, stuck, or lost its engine."""
    whole_s: list[tuple[float, VersionId]] = field(default_factory=list)
    """When every machine served and held the newest version, engines too; and that version. Looked at now and then."""

    def noticed_after(self, at_s: float, key: bytes) -> float | None:
        """Seconds from `at_s` until somebody noticed; None: nobody did."""
        return next((when - at_s for when, whose in self.noticed_s if when >= at_s and whose == key), None)

    def whole_after(self, at_s: float) -> float | None:
        """Seconds from `at_s` until a rollout and a version of after `at_s` were there, and everybody held the newest.
        None: that did not happen."""
        accepted_s = next((when for when in self.accepted_s if when >= at_s), None)
        version = min((id_ for id_, when in self.sealed_s.items() if when >= at_s), default=None)
        if accepted_s is None or version is None:
            return None
        held_s = next((when for when, newest in self.whole_s if when >= at_s and newest >= version), None)
        return None if held_s is None else max(held_s, accepted_s) - at_s
