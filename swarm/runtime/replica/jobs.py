"""The core's jobs, carried out in worker threads: decode, commit, open, replay; and the upkeep that follows a
commit."""

from collections.abc import Awaitable, Callable

import trio

from codec import Manifest, Staged, Torn
from codec.errors import PeerError
from swarm.protocol.core.events import Job, JobDone, JobKind, Opened, VersionId
from swarm.runtime.limits import Limits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.replica.model import Mismatch, Model
from swarm.runtime.threads import RunSync, in_thread
from swarm.store import Store

__all__ = ["Jobs"]


class Jobs:
    """Runs jobs on a `Model`. One at a time writes bits; a few at a time decode."""

    def __init__(
        self, store: Store, model: Model, manifests: Manifests, limits: Limits, run_sync: RunSync = in_thread
    ) -> None:
        self.model = model
        self._store = store
        self._manifests = manifests
        self._limits = limits
        self._run_sync = run_sync
        self._workers = trio.CapacityLimiter(limits.workers)
        self._writer = trio.Lock()
        self._changes: dict[VersionId, tuple[Staged, ...] | None] = {}
        self._anchored: VersionId | None = None

    async def run(self, job: Job) -> JobDone:
        """Do it; how it went. Raises `UsageError` for what only the user can mend (a full disk, a wrong folder)."""
        try:
            if job.kind == JobKind.STAGE:
                async with self._workers:
                    await self._run_sync(self._stage, job)
                return JobDone(job, True)
            async with self._writer:
                if job.kind == JobKind.COMMIT:
                    self._changes[job.version] = await self._run_sync(self._commit, job.version)
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

    async def publish(self, manifest: Manifest, sealed: bytes, tell: Callable[[], Awaitable[None]]) -> None:
        """The trainer's own commit: the seal durable, then told, then the bits."""
        async with self._writer:
            await self._run_sync(self.model.prepare, manifest, sealed)
            await tell()
            version = VersionId(manifest.epoch, manifest.version)
            self._changes[version] = await self._run_sync(self.model.scatter, manifest)

    async def settle(self, version: VersionId, manifest: Manifest) -> tuple[Staged, ...] | None:
        """The core says that our bits are this version: make sure, and make it durable. The changes that led to it from
        the version before, if all are known."""
        changes = self._changes.pop(version, None)
        for older in [each for each in self._changes if each < version]:
            del self._changes[older]
        async with self._writer:
            if self.model.version is None or self.model.version < version:
                _, sealed = self._signed(version)
                await self._run_sync(self.model.settle, manifest, sealed)
        return changes

    def drop(self, version: VersionId) -> None:
        self.model.drop(version)

    async def tend(self, *, whole: bool) -> VersionId | None:
        """Write an anchor when it is time: every so many versions, and (`whole`) when bits came other than by
        chunks."""
        version = self.model.version
        if version is None:
            return None
        if self._anchored is None:
            anchors = self._store.anchors.list()
            self._anchored = anchors[0].version if anchors else None
        due = (
            whole
            or self._anchored is None
            or self._anchored.epoch != version.epoch
            or version.version - self._anchored.version >= self._limits.anchor_every
        )
        if not self.model.spoiled and (not due or self._anchored == version):
            return None
        self._anchored = await self._run_sync(self.model.write_anchor)
        return self._anchored

    # ------------------------------------------------------------ in a worker thread

    def _stage(self, job: Job) -> None:
        chunk = self._store.chunks.chunk(job.key) if job.key is not None else None
        if chunk is None:
            raise Mismatch("the chunk was dropped")
        self.model.stage(chunk)

    def _commit(self, version: VersionId) -> tuple[Staged, ...] | None:
        manifest, sealed = self._signed(version)
        self.model.prepare(manifest, sealed)
        return self.model.scatter(manifest)

    def _open(self, layout_hash: bytes) -> Opened:
        root = self.model.open(layout_hash)
        version = self._manifests.version(root)
        if version is not None:
            self.model.settle(*self._signed(version))
        return Opened(root, self.model.empty)

    def _replay(self, version: VersionId) -> tuple[int, ...]:
        return self.model.replay(*self._signed(version))

    def _signed(self, version: VersionId) -> tuple[Manifest, bytes]:
        found = self._manifests.get(version)
        if found is None:
            raise RuntimeError(f"the core speaks of version {version}, whose manifest never passed the shell")
        return found
