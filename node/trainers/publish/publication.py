"""One version on its way, as the trainer sees it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from codec.errors import SwarmError
from node.trainers.connection.patience import Wait
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["Holders", "Publication"]

SEED_AWAY_S: Final = 60.0
"""Whoever waits for nodes waits through a restart of the seed: as long as publishing does."""


SHOWN: Final = 3
"""Nodes that an error names."""


class Holders(NamedTuple):
    """Who holds a publication, of `nodes` that live. `lacking`: the others, as "box-3 at version 0.11"."""

    nodes: int
    lacking: tuple[str, ...]

    @property
    def share(self) -> float:
        """No nodes: nobody holds it."""
        return 1.0 - len(self.lacking) / self.nodes if self.nodes else 0.0

    def __str__(self) -> str:
        if not self.nodes:
            return "no node is connected to the seed (swarm-node invite prints a ticket, with which they join)"
        more = f" and {len(self.lacking) - SHOWN} others" if len(self.lacking) > SHOWN else ""
        return (
            f"{self.nodes - len(self.lacking)} of {self.nodes} nodes ({self.share:.0%}) hold it, not "
            f"{', '.join(self.lacking[:SHOWN])}{more}"
        )


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
    _holders: Callable[["Publication", float], Holders] = lambda publication, within_s: Holders(0, ())
    _waits_for: Callable[[], str] = lambda: "nothing"

    @property
    def named(self) -> str:
        """ "step 5 (version 0.12)", for people; the version once it is known."""
        version = f" (version {self.epoch}.{self.version})" if self.version is not None else ""
        return f"step {self.step}{version}"

    @property
    def sealed(self) -> bool:
        """It is durable and on its way to every node."""
        return self._done.is_set() and self.error is None and not self.superseded

    def wait(self, quorum: float = 0.0, timeout_s: float = 600.0) -> "Publication":
        """Wait until it is sealed and held, verified, by this share of the live nodes (0: sealed is enough).

        Raises its `error`, `SwarmTimeout`, or `SwarmDown` when the seed stays away for a minute. A superseded one
        returns at once: the newer holds all it would have.
        """
        wait = Wait(timeout_s, lambda: f"{self.named} waits for {self._waits_for()}")
        while not self._done.wait(wait.slice_s()):
            if wait.over:
                raise SwarmTimeout(
                    f"Step {self.step} was not sealed within {timeout_s:.0f} s. The oldest that is not waits for "
                    f"{self._waits_for()}."
                )
            wait.say()
        if self.error is not None:
            raise self.error
        if quorum > 0.0 and not self.superseded:
            self._await_holders(quorum, timeout_s, wait.deadline)
        return self

    def _await_holders(self, quorum: float, timeout_s: float, deadline: float) -> None:
        found = "the seed has not said yet which nodes hold it"
        answered = time.monotonic()
        wait = Wait(max(0.0, deadline - answered), lambda: f"{self.named} waits for {quorum:.0%} of the nodes: {found}")
        while True:
            try:
                held = self._holders(self, max(0.1, deadline - time.monotonic()))
                answered, found, share = time.monotonic(), str(held), held.share
            except (SwarmDown, SwarmTimeout) as error:
                if time.monotonic() >= min(deadline, answered + SEED_AWAY_S):
                    raise
                found, share = str(error), 0.0
            if share >= quorum:
                return
            if wait.over:
                raise SwarmTimeout(
                    f"Step {self.step} is sealed, but not held by {quorum:.0%} of the nodes after {timeout_s:.0f} s: "
                    f"{found}."
                )
            wait.say()
            time.sleep(0.1)

    def end(self, error: SwarmError | None = None) -> None:
        """Nothing more will happen to it."""
        self.error = error
        self._done.set()
