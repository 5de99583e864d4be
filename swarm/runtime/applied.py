"""Follows up each version that the replica has become: made durable, reported to the application, checkpointed.

The core decides that a version is applied (the effect `VersionApplied`). What follows takes time on disk, so two tasks
do it beside the core: one in the order of the versions, one at leisure.
"""

from collections import deque
from typing import TYPE_CHECKING

import trio

from swarm.protocol.core.events import VersionApplied, VersionId
from swarm.protocol.core.notices import CheckpointWritten
from swarm.runtime.application import Application
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.threads import RunSync
from swarm.store import Seal, Store

if TYPE_CHECKING:
    from swarm.runtime.replica.jobs import Jobs

__all__ = ["AppliedVersions"]


class AppliedVersions:
    """The versions that the replica has become (for a relay: whose seal it holds), oldest first."""

    def __init__(
        self,
        store: Store,
        manifests: Manifests,
        jobs: "Jobs | None",
        application: Application,
        limits: RuntimeLimits,
        run_sync: RunSync,
    ) -> None:
        """`jobs`: None for a relay, which has no replica."""
        self._store, self._manifests, self._jobs = store, manifests, jobs
        self._application, self._limits, self._run_sync = application, limits, run_sync
        self.newest: VersionId | None = None if jobs is None else jobs.model.version
        """The newest version that the core has declared applied, or that the start restored; None: there was none."""
        self._waiting: deque[VersionApplied] = deque()
        self._wake_confirm, self._wake_upkeep = trio.Event(), trio.Event()
        self._has_foreign_bits = False
        """Whether bits came other than by chunks since the last checkpoint on disk."""

    def queue_version(self, effect: VersionApplied) -> None:
        """Follow up this version, after those queued before it."""
        self.newest = effect.version
        self._waiting.append(effect)
        self._wake_confirm.set()

    async def confirm_versions(self) -> None:
        """For each queued version: make sure that it is durable, then tell the application. Until cancelled."""
        while True:
            await self._wake_confirm.wait()
            self._wake_confirm = trio.Event()
            while self._waiting:
                effect = self._waiting.popleft()
                changes = None
                if self._jobs is not None:
                    changes = await self._jobs.confirm_version(effect.version, effect.manifest)
                    self._has_foreign_bits = self._has_foreign_bits or changes is None
                elif (found := self._manifests.get(effect.version)) is not None:
                    await self._run_sync(self._store.seal, Seal.of(*found))
                self._application.committed(effect.version, effect.manifest, changes)
                self._wake_upkeep.set()

    async def maintain_store(self) -> None:
        """After versions were applied: write a checkpoint when one is due, and evict what is not needed. Until
        cancelled."""
        while True:
            await self._wake_upkeep.wait()
            self._wake_upkeep = trio.Event()
            if self._jobs is not None:
                foreign, self._has_foreign_bits = self._has_foreign_bits, False
                written = await self._jobs.write_due_checkpoint(force=foreign)
                if written is not None:
                    self._application.notify(CheckpointWritten(written))
            assert self.newest is not None
            await self._run_sync(self._store.evict, self.newest, self._limits.retain_versions)
