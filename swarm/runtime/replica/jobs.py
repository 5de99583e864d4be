"""The core's jobs, carried out in worker threads: stage, apply, open, replay; and the checkpoints that follow."""

from collections.abc import Awaitable, Callable

import trio

from codec import Manifest, StagedChunk, Torn
from codec.errors import PeerError
from swarm.protocol.core.events import Job, JobDone, JobKind, Opened, VersionId
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.replay import Mismatch
from swarm.runtime.threads import RunSync, in_thread
from swarm.store import Store

__all__ = ["Jobs"]


class Jobs:
    """Runs jobs on a `Model`: one at a time that writes bits, and `RuntimeLimits.workers` that decode."""

    def __init__(
        self, store: Store, model: Model, manifests: Manifests, limits: RuntimeLimits, run_sync: RunSync = in_thread
    ) -> None:
        self.model = model
        self._store = store
        self._manifests = manifests
        self._limits = limits
        self._run_sync = run_sync
        self._workers = trio.CapacityLimiter(limits.workers)
        self._writer = trio.Lock()
        self._changes: dict[VersionId, tuple[StagedChunk, ...] | None] = {}
        """What each version changed, until `confirm_version` takes it; None: not all of it was in scratch memory."""
        self._checkpoint_version: VersionId | None = None
        """The version of the newest checkpoint on disk; None: not looked up yet, or there is none."""

    async def run_job(self, job: Job) -> JobDone:
        """Run `job` and return its result. Raises `UsageError` for what only the user can fix (a full disk, a wrong
        folder)."""
        try:
            if job.kind == JobKind.STAGE:
                async with self._workers:
                    await self._run_sync(self._stage, job)
                return JobDone(job, True)
            async with self._writer:
                if job.kind == JobKind.APPLY:
                    self._changes[job.version] = await self._run_sync(self._apply, job.version)
                    return JobDone(job, True)
                if job.kind == JobKind.OPEN:
                    return JobDone(job, True, await self._run_sync(self._open, job.name))
                assert job.kind == JobKind.REPLAY, job.kind
                bad = await self._run_sync(self._replay, job.version)
                return JobDone(job, not bad, bad)
        except Torn as error:
            return JobDone(job, False, error.blocks if job.kind == JobKind.STAGE else str(error))
        except (Mismatch, PeerError) as error:
            return JobDone(job, False, () if job.kind == JobKind.STAGE else str(error))

    async def publish(self, manifest: Manifest, sealed: bytes, announce: Callable[[], Awaitable[None]]) -> None:
        """Apply the trainer's own version: its seal is durable before `announce()`, and the bits are written after."""
        async with self._writer:
            await self._run_sync(self.model.prepare, manifest, sealed)
            await announce()
            await self._run_sync(self.model.apply, manifest)
            self._changes[VersionId(manifest.epoch, manifest.version)] = ()  # a seed has no engine to patch

    async def confirm_version(self, version: VersionId, manifest: Manifest) -> tuple[StagedChunk, ...] | None:
        """Make `version`, which the core has declared applied, durable if it is not yet.

        Returns the changes since the version before; None when not all of them are known.
        """
        changes = self._changes.pop(version, None)
        for older in [known for known in self._changes if known < version]:
            del self._changes[older]
        async with self._writer:
            if self.model.version is None or self.model.version < version:
                _, sealed = self._signed(version)
                await self._run_sync(self.model.confirm, manifest, sealed)
        return changes

    def drop_staged(self, version: VersionId) -> None:
        """Forget what was staged of `version`."""
        self.model.drop_staged(version)

    async def write_due_checkpoint(self, *, force: bool) -> VersionId | None:
        """Write a checkpoint to disk when one is due: every `checkpoint_every` versions, in a new epoch, after damage,
        and with `force` (bits came other than by chunks). Returns its version; None when none was written."""
        version = self.model.version
        if version is None:
            return None
        if self._checkpoint_version is None:
            on_disk = self._store.checkpoints.list()
            self._checkpoint_version = on_disk[0].version if on_disk else None
        last = self._checkpoint_version
        due = (
            force
            or last is None
            or last.epoch != version.epoch
            or version.version - last.version >= self._limits.checkpoint_every
        )
        if not self.model.spoiled and (not due or last == version):
            return None
        self._checkpoint_version = await self._run_sync(self.model.write_checkpoint)
        return self._checkpoint_version

    # ------------------------------------------------------------ in a worker thread

    def _stage(self, job: Job) -> None:
        chunk = self._store.chunks.chunk(job.key) if job.key is not None else None
        if chunk is None:
            raise Mismatch("the chunk was dropped")
        self.model.stage(chunk)

    def _apply(self, version: VersionId) -> tuple[StagedChunk, ...] | None:
        manifest, sealed = self._signed(version)
        self.model.prepare(manifest, sealed)
        return self.model.apply(manifest)

    def _open(self, layout_hash: bytes) -> Opened:
        root = self.model.open(layout_hash)
        version = self._manifests.version(root)
        if version is not None:
            self.model.confirm(*self._signed(version))
        return Opened(root, self.model.empty)

    def _replay(self, version: VersionId) -> tuple[int, ...]:
        return self.model.replay(*self._signed(version))

    def _signed(self, version: VersionId) -> tuple[Manifest, bytes]:
        found = self._manifests.get(version)
        if found is None:
            raise RuntimeError(f"the core speaks of version {version}, whose manifest never passed the runtime")
        return found
