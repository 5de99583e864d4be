"""Carries out a core's effects on trio: events come in here, one at a time, and whatever the core asks for is done.

One task applies events; it never waits for anything but the next one. Everything else runs beside it in one nursery:
the transport, sessions, jobs, writes to the database. What those bring waits in `EventQueue`, which bounds it for each
peer and gives each its turn, so a core that is busy makes readers wait, and through them the peers that cause it.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog
import trio

from codec import ChunkKey, Manifest
from codec.errors import SwarmError, UsageError
from swarm.guard import Source, guarded
from swarm.protocol.core.events import (
    Announce,
    Close,
    Commit,
    Dial,
    Drop,
    Effect,
    Event,
    Heard,
    Job,
    LocalLeave,
    ManifestSeen,
    Notify,
    Persist,
    Persisted,
    PieceBad,
    PieceStored,
    Probe,
    Ready,
    Run,
    Send,
    SendBlob,
    SendBlock,
    SendHeader,
    SendPiece,
    SetTimer,
    VersionId,
)
from swarm.protocol.core.notices import CheckpointWritten, Notice
from swarm.protocol.core.wire import Frame, ManifestNews, WantBlob, WantBlock, Welcome
from swarm.runtime.core_loop import Core, CoreLoop
from swarm.runtime.counts import Counts
from swarm.runtime.limits import Limits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.sessions.inbound import Inbound, header_stored
from swarm.runtime.sessions.outbound import Blob
from swarm.runtime.sessions.peers import Peers
from swarm.runtime.threads import RunSync, in_thread
from swarm.store import Seal, Store, StoredChunk
from swarm.transport.base import Stream, Transport

if TYPE_CHECKING:
    from codec import Staged
    from swarm.runtime.replica.jobs import Jobs
    from swarm.runtime.sessions.answers import Answers

__all__ = ["Core", "Face", "Shell"]

_GATHER_S: Final = 0.2
"""Chunks that become whole wait so long for others, so that they are written together."""
_log = structlog.get_logger(__name__)


class Face(Protocol):
    """Who wants to know. Called from the loop: note it, and come back at once."""

    def committed(self, version: VersionId, manifest: Manifest, changes: "tuple[Staged, ...] | None") -> None:
        """The replica is this version. `changes`: what was written since the one before (for `codec.write_patch`);
        None when it is not known, so that an engine must reload from the replica."""
        ...

    def notify(self, notice: Notice) -> None:
        """A notice of the core, or of the shell (`CheckpointWritten`)."""
        ...


class Shell:
    """Runs one core. `manifests`, `counts` and `peers` are for reading."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        store: Store,
        manifests: Manifests,
        face: Face,
        *,
        authority: bytes,
        jobs: "Jobs | None" = None,
        answers: "Answers | None" = None,
        announce: Callable[[bytes], Awaitable[None]] | None = None,
        limits: Limits | None = None,
        run_sync: RunSync = in_thread,
        outward: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
    ) -> None:
        """`jobs` and `answers` are None for a relay, which has no model. `announce` publishes a manifest by gossip.
        `outward`: what the core is told of the addresses that are listened on.
        """
        self._core = core
        self._transport = transport
        self._store = store
        self._face = face
        self._jobs = jobs
        self._answers = answers
        self._announce = announce
        self._limits = limits or Limits()
        self._run_sync = run_sync
        self._outward = outward
        self._authority = authority
        self._loop = CoreLoop(
            core, self.perform, self._note, self._close_session, lambda owner: self.peers.applied(owner), self._limits
        )
        self._persisting: deque[Persist] = deque()
        self._persist_asked = self._persist_done = 0
        self._persisted = trio.Event()
        self._commits: deque[Commit] = deque()
        self._unwritten: list[ChunkKey] = []
        """Chunks that are whole, and in memory."""
        self._wake_persist, self._wake_commit, self._wake_upkeep = trio.Event(), trio.Event(), trio.Event()
        self._wake_write = trio.Event()
        self._failed: UsageError | None = None
        self._failing = trio.Event()
        self._whole_since = False
        """Bits came other than by chunks since the last anchor."""
        self._is_authority = transport.key == authority
        self._settled: VersionId | None = None
        self.manifests = manifests
        self.counts = Counts()
        inbound = Inbound(
            None if self._is_authority else authority, store.chunks, self.counts, self._limits,
            post=self.post, whole=self._whole, relieve=self._relieve, part=self._part, settled=lambda: self._settled,
        )  # fmt: skip
        self.peers = Peers(
            transport, store.chunks, inbound, self._find, self.counts, self._limits, self._loop,
            core.admits, self._longest,
        )  # fmt: skip
        self._do: dict[type[Effect], Callable[[Any], None]] = {
            Send: self._send,
            SendHeader: self._send_bulk,
            SendPiece: self._send_bulk,
            SendBlob: self._send_bulk,
            SendBlock: self._send_bulk,
            Ready: self._ready,
            Dial: lambda e: self._nursery.start_soon(self.peers.dial, e.peer, e.addrs),
            Probe: lambda e: self._nursery.start_soon(self.peers.probe, e.peer, e.addrs),
            Close: self._close,
            Run: lambda e: self._nursery.start_soon(self._mind, self._run_job, e.job),
            Persist: self._persist,
            Drop: self._drop,
            Commit: self._commit,
            Announce: self._announce_manifest,
            SetTimer: lambda e: self._loop.set_timer(e.name, e.at),
            Notify: lambda e: face.notify(e.notice),
        }

    # ------------------------------------------------------------ life

    async def run(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started()` gives the addresses listened on.

        Raises `UsageError` (in a group) for what the user can mend: a port in use; a full disk, once a member has
        released its lease.
        """
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                addrs = await nursery.start(self._transport.serve, self._accept)
                for work in (self._write_all, self._persist_all, self._settle_all, self._keep_up, self._loop.run):
                    nursery.start_soon(self._mind, work)
                self.perform(self._core.start(trio.current_time(), self._outward(addrs)))
                task_status.started(addrs)
                await self._failing.wait()
                if not self._is_authority:
                    with trio.move_on_after(self._limits.flush_deadline_s):
                        await self.leave()
                assert self._failed is not None
                raise self._failed
        finally:
            self._loop.close()

    async def _mind(self, work: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Do it. What only a person can mend ends the shell, but not before it has said goodbye."""
        try:
            await work(*args)
        except UsageError as error:
            self._fail(error)

    def _fail(self, why: UsageError) -> None:
        self._failed = self._failed or why
        self._failing.set()

    async def post(self, event: Event, size: int = 0) -> None:
        """Give the core an event of `size` bytes; waits while its peer has too many waiting."""
        await self._loop.post(event, size)

    async def apply(self, event: Event) -> None:
        """Give the core an event, and wait until its effects have been begun."""
        await self._loop.apply(event)

    def expel(self, peer: bytes, why: str) -> None:
        """What `peer` sends makes no sense to whoever it is for: its session ends, and it is refused for a while."""
        self._nursery.start_soon(self.post, PieceBad(peer, why))

    async def carry_out(self, effects: list[Effect]) -> None:
        """Perform effects that a person asked for, and wait until what they are to make durable is."""
        self.perform(effects)
        asked = self._persist_asked
        while self._persist_done < asked:
            await self._persisted.wait()

    async def shelter(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await `work()` as a task of the shell: once begun it goes on even when the caller is cancelled.

        `SwarmError`s come out here; anything else is a bug and ends the shell.
        """
        done = trio.Event()
        failed: list[SwarmError] = []

        async def run() -> None:
            try:
                await work()
            except SwarmError as error:
                failed.append(error)
            done.set()

        self._nursery.start_soon(run)
        await done.wait()
        if failed:
            raise failed[0]

    def start(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have `work()` run as a task of the shell. What it raises ends the shell."""
        self._nursery.start_soon(self._mind, work)

    async def gossiped(self, sealed: bytes) -> None:
        """A manifest arrived by gossip, from whom nobody knows: one that is forged changes nothing."""
        with guarded(Source.GOSSIP) as outcome:
            self.manifests.note(sealed)
        if outcome.error is None:
            await self.post(ManifestSeen(sealed))

    async def leave(self) -> None:
        """Release the lease, say goodbye, and let what is queued go out; in `flush_deadline_s` at the latest."""
        await self.apply(LocalLeave())
        sessions = list(self.peers)
        with trio.move_on_after(self._limits.flush_deadline_s):
            for session in sessions:
                session.close("leaving")
            for session in sessions:
                await session.gone.wait()

    async def recall(self) -> None:
        """Tell the core which chunks the store still holds from an earlier run. Once, before peers matter.

        What the authority had not sealed is dead: it is dropped.
        """
        for chunk in self._store.chunks.all():
            version = VersionId(chunk.key.epoch, chunk.key.version)
            if self._is_authority and (self.manifests.get(version) is None or not chunk.whole):
                self._store.chunks.drop(version, chunk.key.attempt)
                continue
            await self.post(header_stored(chunk, None, None))
            for index in chunk.held():
                await self.post(PieceStored(None, None, chunk.key, index))

    # ------------------------------------------------------------ effects

    def _note(self, event: Event) -> None:
        """The shell needs the manifests too. Raises `PeerError` for a forged one."""
        if isinstance(event, Heard) and isinstance(event.message, ManifestNews | Welcome) and event.message.manifest:
            self.manifests.note(event.message.manifest)

    def _longest(self, peer: bytes, dialed: bool) -> int:
        """How long a control message of this peer may be, in bytes."""
        if not (dialed or peer == self._authority or self._core.admits(peer)):
            return self._limits.stranger_message_bytes
        return self._limits.seed_message_bytes if self._is_authority else self._limits.message_bytes

    def _close_session(self, peer: bytes, why: str) -> None:
        session = self.peers.get(peer)
        if session is not None:
            session.close(why)

    def perform(self, effects: list[Effect]) -> None:
        """Begin these effects, in order. Nothing here waits. One that fails keeps none of the others from being begun:
        what the core decided is its state."""
        for number, effect in enumerate(effects):
            try:
                self._do[type(effect)](effect)
            except BaseException:
                self.perform(effects[number + 1 :])
                raise

    def _send(self, effect: Send) -> None:
        session = self.peers.get(effect.peer)
        if session is None:
            return
        if isinstance(effect.message, WantBlob | WantBlock) and self._answers is not None:
            while len(session.requests) >= self._limits.requests_per_peer:
                session.requests.give_up(session.requests.oldest())
            self._answers.ask(effect.peer, session.requests, effect.message)
        self._loop.sent(session.send(effect.message))

    def _send_bulk(self, effect: SendHeader | SendPiece | SendBlob | SendBlock) -> None:
        session = self.peers.get(effect.peer)
        if session is not None:
            session.send_bulk(effect)

    def _ready(self, effect: Ready) -> None:
        session = self.peers.get(effect.peer)
        if session is not None:
            session.bulk.be_ready()

    def _close(self, effect: Close) -> None:
        if effect.ban_s:
            self.peers.ban(effect.peer, effect.ban_s)
        session = self.peers.get(effect.peer)
        if session is not None:
            session.close(effect.why)

    def _drop(self, effect: Drop) -> None:
        """What was sealed stays for a restart until `evict` finds that it is not needed."""
        if effect.attempt is not None or self._settled is None or effect.version > self._settled:
            self._store.chunks.drop(effect.version, effect.attempt)
            if self._jobs is not None:
                self._jobs.drop(effect.version)

    def _persist(self, effect: Persist) -> None:
        self._persisting.append(effect)
        self._persist_asked += 1
        self._wake_persist.set()

    def _commit(self, effect: Commit) -> None:
        self._settled = effect.version
        self._commits.append(effect)
        self._wake_commit.set()

    def _announce_manifest(self, effect: Announce) -> None:
        if self._announce is not None:
            self._nursery.start_soon(self._tell_all, self._announce, effect.manifest)

    async def _tell_all(self, announce: Callable[[bytes], Awaitable[None]], manifest: bytes) -> None:
        with guarded(Source.GOSSIP):
            await announce(manifest)

    # ------------------------------------------------------------ beside the core

    async def _accept(self, peer: bytes, lane: Any, stream: Stream) -> None:
        await self.peers.accept(peer, lane, stream)

    async def _run_job(self, job: Job) -> None:
        if self._jobs is None:
            raise RuntimeError(f"a relay was asked to {job.kind}")
        await self.post(await self._jobs.run(job))

    async def _persist_all(self) -> None:
        """Write what waits in one transaction, then say so; and again."""
        while True:
            await self._wake_persist.wait()
            self._wake_persist = trio.Event()
            batch, self._persisting = self._persisting, deque()
            if batch:
                await self._run_sync(self._store.records.put, [(effect.name, effect.record) for effect in batch])
                self._persist_done += len(batch)
                self._persisted.set()
                self._persisted = trio.Event()
            for effect in batch:
                await self.post(Persisted(effect.token))

    async def _settle_all(self) -> None:
        """Follow up commits in their order: make sure that they are durable, then tell the face."""
        while True:
            await self._wake_commit.wait()
            self._wake_commit = trio.Event()
            while self._commits:
                effect = self._commits.popleft()
                changes = None
                if self._jobs is not None:
                    changes = await self._jobs.settle(effect.version, effect.manifest)
                    self._whole_since = self._whole_since or changes is None
                elif (found := self.manifests.get(effect.version)) is not None:
                    await self._run_sync(self._store.seal, Seal.of(*found))
                self._face.committed(effect.version, effect.manifest, changes)
                self._wake_upkeep.set()

    async def _keep_up(self) -> None:
        """After commits, at leisure: an anchor when it is time, and what nobody needs any more removed."""
        while True:
            await self._wake_upkeep.wait()
            self._wake_upkeep = trio.Event()
            if self._jobs is not None:
                whole, self._whole_since = self._whole_since, False
                anchored = await self._jobs.tend(whole=whole)
                if anchored is not None:
                    self._face.notify(CheckpointWritten(anchored))
            assert self._settled is not None
            await self._run_sync(self._store.evict, self._settled, self._limits.retain_versions)

    def _whole(self, chunk: StoredChunk) -> None:
        self._unwritten.append(chunk.key)
        self._wake_write.set()

    async def _write_all(self) -> None:
        """Write chunks that have become whole, many at a time: a visit to a thread costs more than writing one does,
        and what children still wait for is in memory meanwhile."""
        while True:
            await self._wake_write.wait()
            await trio.sleep(_GATHER_S)
            self._wake_write = trio.Event()
            keys, self._unwritten = self._unwritten, []
            await self._run_sync(self._store.chunks.spill, *keys)

    async def _relieve(self) -> None:
        await self._mind(self._run_sync, self._store.chunks.spill_all)

    async def _find(self, effect: SendBlob | SendBlock) -> Blob | None:
        return None if self._answers is None else await self._answers.find(effect)

    async def _part(self, peer: bytes, frame: Frame, body: bytes) -> None:
        session = self.peers.get(peer)
        if session is None:
            return
        answer = session.requests.part(frame, body)
        if answer is None or self._answers is None:
            return
        try:
            event = await self._answers.take(peer, answer)
        except UsageError as error:
            self._fail(error)
            return
        if event is None:
            self.counts.stray += len(answer.data)
        else:
            self.counts.received += len(answer.data)
            await self.post(event)
