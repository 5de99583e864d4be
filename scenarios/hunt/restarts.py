"""What a machine would start with if its power failed now: the product's own recovery, run on a copy of the disk.

In a run each machine is started a few times, so that few of the moments come up at which power may fail. Here a copy of
a machine's disk loses what a power failure would lose, and is opened as a start opens it; the machine itself goes on.
What the seed has shown or promised must be there, and every bit must be right.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from codec import Checkpoint, Layout, open_manifest
from codec.errors import UsageError
from node.coordinator import coordinator
from node.coordinator.recovery import CHECKPOINTS_KEPT
from node.host.endpoint import store_folder
from node.ledger.book import LEDGER, Book
from node.ledger.settings import Settings
from node.ledger.state import Head
from scenarios.hunt.machine import Machine
from scenarios.hunt.observed import bits_of
from swarm.protocol.core.version import VersionId
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.own import BELIEVED
from swarm.store import Store
from swarm.store.disk import Disk

__all__ = ["Restarts"]

_SEED: Final = {"Announce": 0.5, "Send Verdict": 0.1, "Send WorkLease": 0.05}
_NODE: Final = {"VersionApplied": 0.1}
"""How often to look at an effect of a seed and of a node; what is shown and promised most often."""
_OTHERS: Final = 0.001
"""And at each other effect."""


class Restarts:
    """Of all machines of one run."""

    def __init__(self, scratch: Path, base: Path, layout: Layout, seed: int) -> None:
        """`scratch`: a folder for the copies, on no machine's disk. `base`: the folder with the base model."""
        self._scratch, self._base, self._layout = scratch, base, layout
        self._rng = random.Random(f"restarts {seed}")

    def of_seed(self, machine: Machine) -> Callable[[str], None]:
        """Looks at the seed, now and then, when an effect of this name is about to be performed."""
        return partial(self._look, _SEED, machine, partial(self._check_seed, machine))

    def of_node(self, machine: Machine, authority: bytes) -> Callable[[str], None]:
        """As `of_seed`, for a node of the swarm of `authority`."""
        return partial(self._look, _NODE, machine, partial(self._check_node, machine, authority))

    def _look(self, shares: Mapping[str, float], machine: Machine, check: Callable[[Path], None], name: str) -> None:
        if self._rng.random() < shares.get(name, _OTHERS):
            machine.tally.looks += 1
            with self._after_cut(machine) as home:
                check(home)

    @contextmanager
    def _after_cut(self, machine: Machine) -> Iterator[Path]:
        """The home that a power failure now would leave."""
        machine.disk.copy_after_cut(self._rng, self._scratch)
        try:
            yield self._scratch
        finally:
            shutil.rmtree(self._scratch)

    def _check_seed(self, machine: Machine, home: Path) -> None:
        key, oracle, where = machine.key, machine.oracle, f"{machine.name}, if its power failed now,"
        try:
            with (
                Store(store_folder(home, key.public), key.public, Disk(), checkpoints_kept=CHECKPOINTS_KEPT) as store,
                closing(Book(home / LEDGER)) as book,
            ):
                model, base = Model(store, base=self._base), Checkpoint.open(self._base)
                sealed = coordinator.open_newest_version(store, model, base, self._layout, key)
                manifest = open_manifest(sealed, key.public)
                version = VersionId(manifest.epoch, manifest.version)
                oracle.started(version, where)
                self._check_model(machine, model, version, manifest.root, where)
                boot = int(store.records.get("boot") or 0)
                oracle.check("no boot number twice", boot >= oracle.boot, f"{where} has boot {boot}")
                head = Head(version.epoch, version.version, manifest.root)
                oracle.ledger_started(book.restore(Settings(), head, oracle.now), book)
        except UsageError as error:
            oracle.violate("no sealed version lost", f"{where} would not start: {error}")

    def _check_node(self, machine: Machine, authority: bytes, home: Path) -> None:
        where = f"{machine.name}, if its power failed now,"
        try:
            with Store(store_folder(home, authority), authority, Disk()) as store:
                model = Model(store)
                if (seal := model.restore()) is not None:
                    self._check_model(machine, model, seal.id, seal.root, where)
        except UsageError as error:
            machine.oracle.check("no start fails", machine.suffered, f"{where} would not start: {error}")

    def _check_model(self, machine: Machine, model: Model, version: VersionId, root: bytes, where: str) -> None:
        """What was restored has the bits of its version, and they were hashed: only a clean end lets a start believe
        its disk, and a process that runs has not ended."""
        believed = BELIEVED in model._unproven and "lie" not in machine.suffered
        machine.oracle.check("no bit believed", not believed, f"{where} believes bits that it has not hashed")
        if not believed:
            machine.oracle.restored(version, root, bits_of(model), where)
