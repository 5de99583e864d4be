"""Which version of the swarm each step of a trainer became: a trainer that counts its own steps asks for these."""

import bisect

__all__ = ["PublishedSteps"]


class PublishedSteps:
    """Of one process. Versions are (epoch, number)."""

    def __init__(self) -> None:
        self._published: list[tuple[tuple[int, int], int]] = []  # ((epoch, number), step), ascending

    def note(self, version: tuple[int, int], step: int) -> None:
        """`step` was published as `version`."""
        self._published = sorted({**dict(self._published), version: step}.items())

    def step_of(self, version: tuple[int, int], default: int) -> int:
        """The step that became `version`, else the newest step before it. Before the first `note`: `default`."""
        at = bisect.bisect_right(self._published, version, key=lambda published: published[0])
        return self._published[max(0, at - 1)][1] if self._published else default
