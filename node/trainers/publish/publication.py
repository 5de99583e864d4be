"""One version on its way, as the trainer sees it."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from codec.errors import SwarmError
from node.settings.units import version_text
from node.trainers.connection.patience import Wait
from node.trainers.errors import SwarmDown, SwarmTimeout

__all__ = ["Holders", "Publication"]

SEED_AWAY_S: Final = 60.0
"""A wait for nodes outlasts a restart of the seed: as long as a publish waits for one (`seedwatch.RECONNECT_S`)."""
SHOWN: Final = 3
"""How many nodes an error names."""


Root = bytes
"""A name for the type, because `Publication` has a field that is called `bytes`."""


class Holders(NamedTuple):
    """How many of the `nodes` live nodes hold a publication. `lacking`: the others, as "box-3 at version 0.11"."""

    nodes: int
    lacking: tuple[str, ...]

    @property
    def share(self) -> float:
        """The share of live nodes that hold it, 0 to 1; 0 when there is no node."""
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
    """One version on its way, as `Swarm.publish` returns it.

    Read the fields, and call `wait`. Fields are None (or empty) until they are known; after `wait` all of them are.

    `step`: the trainer's own count, as it was given. `epoch`, `version`: the version's name. `root`: its root, 32
    bytes. `bytes`: payload of its chunks. `changed`: elements whose bits differ from the version before. `density`:
    `changed` as a share of all elements: of the base, or of the adapter with its configuration. `seconds`: by stage,
    "wait" (for a free copy) and "copy" within `publish`; "queue" (until the version before was sealed), "encode" (diff,
    code, hash, stream) and "seal" in the background. `error`: why the version was not published. `superseded`: a newer
    publish took its place before it began (`on_busy="coalesce"`). `adapter`, `adapter_version`: of an adapter, its
    name, and how many versions have changed it; None: the base was published.
    """

    step: int
    epoch: int | None = None
    version: int | None = None
    root: Root | None = None
    bytes: int | None = None
    changed: int | None = None
    density: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: SwarmError | None = None
    superseded: bool = False
    adapter: str | None = None
    adapter_version: int | None = None
    _done: threading.Event = field(default_factory=threading.Event, repr=False)
    _holders: Callable[["Publication", float], Holders] = field(
        default=lambda publication, within_s: Holders(0, ()), repr=False
    )
    _waits_for: Callable[[], str] = field(default=lambda: "nothing", repr=False)

    @property
    def named(self) -> str:
        """The step and, once it is known, the version in words: "step 5 (version 12)"."""
        if self.epoch is None or self.version is None:
            return f"step {self.step}"
        return f"step {self.step} (version {version_text((self.epoch, self.version))})"

    @property
    def sealed(self) -> bool:
        """Whether the version is durable at the seed, signed, and on its way to every node."""
        return self._done.is_set() and self.error is None and not self.superseded

    def wait(self, quorum: float = 0.0, timeout_s: float = 600.0) -> "Publication":
        """Wait until the version is sealed, and until the share `quorum` of the live nodes holds it, verified.

        `quorum`: 0 to 1; 0: do not wait for nodes. `timeout_s`: for both together. Returns this publication. Returns at
        once for a superseded one: the newer version contains its changes.

        Raises its `error` when the version was not published, `SwarmTimeout` after `timeout_s`, and `SwarmDown` when
        the seed stays down for a minute.
        """
        wait = Wait(timeout_s, lambda: f"{self.named} waits for {self._waits_for()}")
        while not self._done.wait(wait.slice_s()):
            if wait.over:
                raise SwarmTimeout(
                    f"Step {self.step} was not sealed within {timeout_s:.0f} s. The oldest unsealed version waits for "
                    f"{self._waits_for()}."
                )
            wait.log_if_due()
        if self.error is not None:
            raise self.error
        if quorum > 0.0 and not self.superseded:
            self._await_holders(quorum, timeout_s, wait.deadline)
        return self

    def _await_holders(self, quorum: float, timeout_s: float, deadline: float) -> None:
        found = "the seed has not reported yet which nodes hold it"
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
            wait.log_if_due()
            time.sleep(0.1)

    # ------------------------------------------------------------ for the publish line

    def note_opened(self, epoch: int, version: int) -> None:
        """The seed has given the version its name."""
        self.epoch, self.version = epoch, version

    def note_sealed(self, root: Root, payload_bytes: int, changed: int, elements: int) -> None:
        """The seed has sealed the version. `root`: over all parts. `elements`: of the model, or of the adapter and its
        configuration."""
        self.root, self.bytes, self.changed = root, payload_bytes, changed
        self.density = changed / max(1, elements)

    def supersede(self) -> None:
        """A newer publish takes the place of this one."""
        self.superseded = True
        self.end()

    def end(self, error: SwarmError | None = None) -> None:
        """Nothing more will happen to this publication. `error`: why it was not published."""
        self.error = error
        self._done.set()
