"""Connects a core with transport, sessions, store and worker threads, and carries out its effects.

`core_loop` applies events and never waits for anything but the next one. Everything else runs beside it in one nursery:
the transport, sessions, jobs, writes to the database. Their results wait in `EventQueue`, which bounds them for each
peer, so a busy core makes readers wait, and through them the peers that cause the load.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import trio

from codec import ChunkHeader
from codec.errors import SwarmError
from swarm.guard import Source, guarded
from swarm.protocol.core.events import (
    Announce,
    Close,
    Dial,
    Drop,
    Effect,
    Event,
    Heard,
    Job,
    LocalLeave,
    ManifestSeen,
    Notify,
    PeerUp,
    Persist,
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
    VersionApplied,
    VersionId,
)
from swarm.protocol.core.wire import ManifestNews, WantBlob, WantBlock, Welcome
from swarm.runtime.application import Application
from swarm.runtime.applied import AppliedVersions
from swarm.runtime.core_loop import Core, CoreLoop
from swarm.runtime.counts import Counts
from swarm.runtime.failure import Failure
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.replica.manifests import Manifests
from swarm.runtime.sessions.inbound import Inbound, PartReceiver, header_stored
from swarm.runtime.sessions.outbound import Blob, Outbound
from swarm.runtime.sessions.peers import Peers
from swarm.runtime.threads import RunSync, in_thread
from swarm.runtime.writers import ChunkWriter, RecordWriter
from swarm.store import Store
from swarm.transport.base import Stream, Transport

if TYPE_CHECKING:
    from swarm.runtime.services import ReplicaServices

__all__ = ["Application", "Core", "Runtime"]


class Runtime:
    """Runs one core. `manifests`, `counts` and `peers` are for reading."""

    def __init__(
        self,
        core: Core,
        transport: Transport,
        store: Store,
        manifests: Manifests,
        application: Application,
        *,
        services: "ReplicaServices | None" = None,
        announce: Callable[[bytes], Awaitable[None]] | None = None,
        limits: RuntimeLimits | None = None,
        run_sync: RunSync = in_thread,
        outward: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
    ) -> None:
        """`manifests` names the authority. `services`: None for a relay, which has no model. `announce` publishes a
        manifest by gossip. `outward` maps the addresses that are listened on to those that the core is told.
        """
        limits = limits or RuntimeLimits()
        self._core, self._transport, self._store = core, transport, store
        self._jobs = None if services is None else services.jobs
        self._blobs = None if services is None else services.blobs
        self._announce = announce
        self._limits = limits
        self._outward = outward
        self._is_authority = transport.key == manifests.authority
        self.manifests = manifests
        self.counts = Counts()
        self._failure = Failure()
        self._loop = CoreLoop(core, limits)
        self._records = RecordWriter(store.records, self._loop.post, run_sync)
        self._chunks = ChunkWriter(store.chunks, self._failure, run_sync)
        self._applied = AppliedVersions(store, manifests, self._jobs, application, limits, run_sync)
        parts = PartReceiver(self._blobs, self._loop.post, self._failure, self.counts)
        inbound = Inbound(
            None if self._is_authority else manifests.authority, store.chunks, self._chunks, parts, self._applied,
            self._loop.post, self.counts, limits, self._needs,
        )  # fmt: skip
        self.peers = Peers(
            transport, manifests.authority, core.admits, inbound, self._outbound_queue, self._loop, self.counts, limits
        )
        self._begin: dict[type[Effect], Callable[[Any], None]] = {
            Send: self._send,
            SendHeader: self._send_bulk,
            SendPiece: self._send_bulk,
            SendBlob: self._send_bulk,
            SendBlock: self._send_bulk,
            Ready: self._open_bulk_stream,
            Dial: lambda e: self._nursery.start_soon(self.peers.dial, e.peer, e.addrs),
            Probe: lambda e: self._nursery.start_soon(self.peers.probe, e.peer, e.addrs),
            Close: self._close_and_ban,
            Run: lambda e: self._nursery.start_soon(self._failure.watch, self._run_job, e.job),
            Persist: self._records.queue_record,
            Drop: self._drop_chunks,
            VersionApplied: self._applied.queue_version,
            Announce: self._announce_manifest,
            SetTimer: lambda e: self._loop.set_timer(e.name, e.at),
            Notify: lambda e: application.notify(e.notice),
        }

    # ------------------------------------------------------------ life

    async def run(self, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started()` gives the addresses listened on.

        Raises `UsageError` (in a group) for what the user can fix: a port in use; a full disk, once a member has
        released its lease.
        """
        tasks = (
            self._chunks.write_chunks,
            self._records.write_records,
            self._applied.confirm_versions,
            self._applied.maintain_store,
        )
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                addrs = await nursery.start(self._transport.serve, self._accept)
                for task in tasks:
                    nursery.start_soon(self._failure.watch, task)
                nursery.start_soon(self._failure.watch, self._loop.apply_events, self)
                self.perform(self._core.start(trio.current_time(), self._outward(addrs)))
                task_status.started(addrs)
                error = await self._failure.wait()
                if not self._is_authority:
                    with trio.move_on_after(self._limits.flush_deadline_s):
                        await self.leave()
                raise error
        finally:
            self._loop.release_waiters()

    async def post(self, event: Event, size: int = 0) -> None:
        """Queue an event of `size` bytes for the core; waits while too many of the same peer are queued."""
        await self._loop.post(event, size)

    async def apply(self, event: Event) -> None:
        """Queue an event of our own, and wait until its effects have begun."""
        await self._loop.apply(event)

    def expel(self, peer: bytes, why: str) -> None:
        """End the session with `peer`, which sent invalid content, and refuse it for a while."""
        self._nursery.start_soon(self.post, PieceBad(peer, why))

    async def carry_out(self, effects: list[Effect]) -> None:
        """Perform effects that a person asked for, and wait until the records among them are durable."""
        self.perform(effects)
        await self._records.wait_until_durable()

    async def shelter(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await `work()` in a task of the runtime, which continues when the caller is cancelled.

        Raises the `SwarmError` of `work`. Any other error is a bug and ends the runtime.
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

    def start_task(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work()` as a task of the runtime. Its errors end the runtime."""
        self._nursery.start_soon(self._failure.watch, work)

    async def take_gossip(self, sealed: bytes) -> None:
        """Take a manifest that arrived by gossip. Its sender is unknown, so a forged one changes nothing."""
        with guarded(Source.GOSSIP) as outcome:
            self.manifests.note(sealed)
        if outcome.error is None:
            await self.post(ManifestSeen(sealed))

    async def leave(self) -> None:
        """Release the lease, say goodbye, and flush every session, for at most `flush_deadline_s`."""
        await self.apply(LocalLeave())
        sessions = list(self.peers)
        with trio.move_on_after(self._limits.flush_deadline_s):
            for session in sessions:
                session.close("leaving")
            for session in sessions:
                await session.gone.wait()

    async def post_stored_chunks(self) -> None:
        """Tell the core which chunks the store holds from an earlier run. Call it once, before peers are connected.

        The authority drops chunks of versions that it never sealed: no member may have them.
        """
        for chunk in self._store.chunks.all():
            version = VersionId(chunk.key.epoch, chunk.key.version)
            if self._is_authority and (self.manifests.get(version) is None or not chunk.whole):
                self._store.chunks.drop(version, chunk.key.attempt)
                continue
            if chunk.bodiless and self._needs(chunk.header):  # what a disk says of bodies is not signed
                self._store.chunks.expect_body(chunk.key)
            await self.post(header_stored(chunk, None, None))
            for index in chunk.held():
                await self.post(PieceStored(None, None, chunk.key, index))

    def _needs(self, header: ChunkHeader) -> bool:
        """Whether this member needs the pieces of a chunk, and not its header only. A relay passes all on."""
        if self._jobs is None:
            return True
        model = self._jobs.model
        return model.holding.needs(header, model.layout)

    # ------------------------------------------------------------ called by the core loop

    def check_event(self, event: Event) -> None:
        """Remember the manifest in a peer's message, and the sessions that the core knows. Raises `PeerError` for a
        forged manifest."""
        if isinstance(event, PeerUp) and (session := self.peers.get(event.peer)) is not None:
            session.known = True
        if isinstance(event, Heard) and isinstance(event.message, ManifestNews | Welcome) and event.message.manifest:
            self.manifests.note(event.message.manifest)

    def close_session(self, peer: bytes, why: str) -> None:
        """End the session with `peer`, if there is one."""
        session = self.peers.get(peer)
        if session is not None:
            session.close(why)

    def event_applied(self, owner: bytes) -> None:
        """The core may have admitted a peer."""
        self.peers.event_applied(owner)

    def perform(self, effects: list[Effect]) -> None:
        """Begin these effects, in order. Nothing here waits.

        When one raises, the others are begun all the same: the core's state says that they were.
        """
        for number, effect in enumerate(effects):
            try:
                self._begin[type(effect)](effect)
            except BaseException:
                self.perform(effects[number + 1 :])
                raise

    # ------------------------------------------------------------ effects

    def _send(self, effect: Send) -> None:
        session = self.peers.get(effect.peer)
        if session is None or not session.known:
            return
        if isinstance(effect.message, WantBlob | WantBlock) and self._blobs is not None:
            while len(session.requests) >= self._limits.requests_per_peer:
                session.requests.give_up(session.requests.oldest())
            self._blobs.note_request(effect.peer, session.requests, effect.message)
        self._loop.charge_sent(session.send(effect.message))

    def _send_bulk(self, effect: SendHeader | SendPiece | SendBlob | SendBlock) -> None:
        session = self.peers.get(effect.peer)
        if session is not None and session.known:
            session.send_bulk(effect)

    def _open_bulk_stream(self, effect: Ready) -> None:
        session = self.peers.get(effect.peer)
        if session is not None:
            session.bulk.be_ready()

    def _close_and_ban(self, effect: Close) -> None:
        if effect.ban_s:
            self.peers.ban(effect.peer, effect.ban_s)
        self.close_session(effect.peer, effect.why)

    def _drop_chunks(self, effect: Drop) -> None:
        """Drop chunks; those of applied versions stay for a restart until the store evicts them."""
        applied = self._applied.newest
        if effect.attempt is not None or applied is None or effect.version > applied:
            self._store.chunks.drop(effect.version, effect.attempt)
            if self._jobs is not None:
                self._jobs.drop_staged(effect.version)

    def _announce_manifest(self, effect: Announce) -> None:
        if self._announce is not None:
            self._nursery.start_soon(self._gossip_manifest, self._announce, effect.manifest)

    async def _gossip_manifest(self, announce: Callable[[bytes], Awaitable[None]], manifest: bytes) -> None:
        with guarded(Source.GOSSIP):
            await announce(manifest)

    async def _run_job(self, job: Job) -> None:
        if self._jobs is None:
            raise RuntimeError(f"a relay was asked to {job.kind}")
        await self.post(await self._jobs.run_job(job))

    # ------------------------------------------------------------ streams

    async def _accept(self, peer: bytes, lane: Any, stream: Stream) -> None:
        await self.peers.accept(peer, lane, stream)

    def _outbound_queue(self, must_wait: Callable[[], bool]) -> Outbound:
        return Outbound(self._store.chunks, self._find_blob, self.counts, self._limits, must_wait, self._loop.follow)

    async def _find_blob(self, effect: SendBlob | SendBlock) -> Blob | None:
        return None if self._blobs is None else await self._blobs.find_blob(effect)
