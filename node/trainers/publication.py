"""One version on its way, as the trainer sees it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from codec.errors import SwarmError
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["Publication"]

SEED_AWAY_S: Final = 60.0
"""Whoever waits for nodes waits through a restart of the seed: as long as publishing does."""


@dataclass(eq=False)
class Publication:
    """One version on its way. Fields are None (or empty) until they are known; `wait` waits for them all.

    `bytes`: payload of its chunks. `changed`: elements whose bits differ, `density` the share of all. `seconds` by
    stage: wait (for a free copy) and copy, both in `publish`; queue (until the version before was sealed), encode
    (diff, code, hash, stream) and seal, in the background. `error`: why it was not published. `superseded`: a newer one
    took its place before it began (`on_busy="coalesce"`).
    """

    step: int
    epoch: int | None = None
    version: int | None = None
    root: bytes | None = None
    bytes: int | None = None
    changed: int | None = None
    density: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: SwarmError | None = None
    superseded: bool = False
    _done: threading.Event = field(default_factory=threading.Event)
    _holders: Callable[["Publication", float], float] = lambda publication, within_s: 0.0

    @property
    def sealed(self) -> bool:
        """It is durable and on its way to every node."""
        return self._done.is_set() and self.error is None and not self.superseded

    def wait(self, quorum: float = 0.0, timeout_s: float = 600.0) -> "Publication":
        """Wait until it is sealed and held, verified, by this share of the live nodes (0: sealed is enough).

        Raises its `error`, `SwarmTimeout`, or `SwarmDown` when the seed stays away for a minute. A superseded one
        returns at once: the newer holds all it would have.
        """
        deadline = time.monotonic() + timeout_s
        if not self._done.wait(timeout_s):
            raise SwarmTimeout(f"Step {self.step} was not sealed within {timeout_s:.0f} s.")
        if self.error is not None:
            raise self.error
        answered = time.monotonic()
        while quorum > 0.0 and not self.superseded:
            try:
                held = self._holders(self, max(0.1, deadline - time.monotonic()))
                answered = time.monotonic()
            except (SwarmDown, SwarmTimeout):
                if time.monotonic() >= min(deadline, answered + SEED_AWAY_S):
                    raise
                held = 0.0
            if held >= quorum:
                break
            if time.monotonic() >= deadline:
                raise SwarmTimeout(f"Step {self.step}: {held:.0%} of the nodes hold it after {timeout_s:.0f} s.")
            time.sleep(0.1)
        return self

    def end(self, error: SwarmError | None = None) -> None:
        """Nothing more will happen to it."""
        self.error = error
        self._done.set()
