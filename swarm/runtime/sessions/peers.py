"""All sessions of one runtime: accepted, dialed, crossed, banned, and what an error in one of them means.

Errors of sessions are judged here and nowhere else in this ring. A peer whose bytes do not verify, or reveal a bug of
ours, is reported to the core, which bans it. A peer that is too slow, or whose connection broke, loses its session. A
`UsageError`, which the user can fix, is raised to the caller.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import structlog
import trio

from swarm.guard import Source, guarded
from swarm.protocol.core.events import PeerDown, PeerUp, PieceBad, Probed
from swarm.runtime.core_loop import CoreLoop
from swarm.runtime.counts import Counts
from swarm.runtime.event_queue import OURS
from swarm.runtime.limits import RuntimeLimits
from swarm.runtime.sessions.bulk import BulkStreams, MakeQueue
from swarm.runtime.sessions.inbound import Inbound
from swarm.runtime.sessions.pacing import Pacer
from swarm.runtime.sessions.requests import Requests
from swarm.runtime.sessions.session import Reading, Session
from swarm.transport.base import Lane, Stream, Transport

__all__ = ["Peers"]

_BANS_KEPT: Final = 1024
"""Bans, over or not, that are kept before expired ones are looked for."""
_log = structlog.get_logger(__name__)


class Peers:
    """The sessions of one runtime, one for each peer."""

    def __init__(
        self,
        transport: Transport,
        authority: bytes,
        admits: Callable[[bytes], bool],
        inbound: Inbound,
        make_queue: MakeQueue,
        loop: CoreLoop,
        counts: Counts,
        limits: RuntimeLimits,
    ) -> None:
        """`admits`: whether a peer has shown a valid grant. Bulk streams of other peers are not read."""
        self._transport = transport
        self._authority = authority
        self._admits = admits
        self._inbound = inbound
        self._make_queue = make_queue
        self._loop = loop
        self._counts = counts
        self._limits = limits
        self._sessions: dict[bytes, Session] = {}
        self._banned: dict[bytes, float] = {}
        """By peer: until when its streams are refused."""
        self._prune_at = _BANS_KEPT
        self._dialing: set[bytes] = set()
        self._bulk_in: dict[bytes, list[trio.CancelScope]] = {}
        """By peer: its bulk streams that are read, oldest first."""
        self._early: dict[bytes, trio.Event] = {}
        """Peers whose bulk streams came before their session, or before the core read their hello; set when the core
        has admitted the peer."""
        self.pacer = Pacer(limits.up_mbit, transport.departed_bytes)
        """Of this machine's uplink, for everything that is no control message."""
        self._probing = trio.CapacityLimiter(limits.probes)
        self._large = trio.CapacityLimiter(limits.large_messages)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, peer: bytes) -> Session | None:
        """The session with `peer`, if there is one."""
        return self._sessions.get(peer)

    def ban(self, peer: bytes, ban_s: float) -> None:
        """Refuse the streams of `peer` for this long."""
        now = trio.current_time()
        if len(self._banned) >= self._prune_at:  # not each time: strangers can have 60,000 of their keys banned
            self._banned = {other: until for other, until in self._banned.items() if until > now}
            self._prune_at = max(_BANS_KEPT, 2 * len(self._banned))
        self._banned[peer] = now + ban_s

    async def accept(self, peer: bytes, lane: Lane, stream: Stream) -> None:
        """Serve a stream that a peer opened. The transport calls this for each of them."""
        if self._banned.get(peer, 0.0) > trio.current_time():
            return
        if lane is Lane.BULK:
            await self._read_bulk(peer, stream)
        elif peer in self._sessions or len(self._sessions) < self._limits.sessions:
            await self._hold_session(peer, stream, dialed=False)

    async def dial(self, peer: bytes, addrs: tuple[str, ...]) -> None:
        """Connect to `peer` and hold the session until it ends. Posts `PeerDown(dial_failed=True)` on failure."""
        if peer in self._dialing or peer in self._sessions:
            return
        self._dialing.add(peer)
        stream: Stream | None = None
        try:
            with guarded(Source.STREAM, peer) as outcome, trio.fail_after(self._limits.dial_deadline_s):
                await self._transport.connect(peer, addrs)
                stream = await self._transport.open_stream(peer, Lane.CONTROL)
            if stream is None:
                why = "no answer" if isinstance(outcome.error, trio.TooSlowError) else outcome.why
                await self._loop.post(PeerDown(peer, dial_failed=True, why=why))
                return
        finally:
            self._dialing.discard(peer)
        async with stream:
            await self._hold_session(peer, stream, dialed=True)

    async def probe(self, peer: bytes, addrs: tuple[str, ...]) -> None:
        """Dial `peer` back at each of these addresses, and post `Probed` with those at which it answered itself."""
        answered: set[str] = set()

        async def probe_address(address: str) -> None:
            with guarded(Source.PROBE, peer), trio.move_on_after(self._limits.dial_deadline_s):
                if await self._transport.probe(peer, address):
                    answered.add(address)

        async with self._probing, trio.open_nursery() as nursery:
            for address in addrs:
                nursery.start_soon(probe_address, address)
        await self._loop.post(Probed(peer, tuple(address for address in addrs if address in answered)))

    # ------------------------------------------------------------ one session

    async def _hold_session(self, peer: bytes, stream: Stream, *, dialed: bool) -> None:
        while (old := self._sessions.get(peer)) is not None:
            if not self._replaces(old, peer, dialed):
                return
            old.crossed = True
            old.end("another session took its place")
            await old.gone.wait()
        bulk = BulkStreams(self._make_queue, self._limits, self.pacer)
        session = Session(peer, stream, dialed=dialed, bulk=bulk, counts=self._counts, limits=self._limits)
        self._sessions[peer] = session
        await self._loop.post(PeerUp(peer, dialed, self._transport.remote_address(peer)))
        broken = await self._judge(Source.CONTROL, peer, session, lambda: self._run_session(session))
        del self._sessions[peer]
        if not session.crossed:
            for scope in self._bulk_in.get(peer, ()):
                scope.cancel()
            if broken or session.why:  # after a clean end the connection may already carry the peer's next session
                with trio.move_on_after(self._limits.flush_deadline_s):
                    await self._transport.disconnect(peer)
        await self._loop.post(PeerDown(peer, why=broken or session.why or "closed by the peer"))
        session.gone.set()

    def _replaces(self, old: Session, peer: bytes, dialed: bool) -> bool:
        """Whether a new session replaces `old`; both ends decide alike.

        When both dialed at once, the session that the lower key dialed stays. Two sessions in one direction, or one
        long after the other, did not cross: the peer lost the old one before we noticed.
        """
        if old.dialed == dialed or trio.current_time() - old.since_s > self._limits.crossing_s:
            return True
        return dialed == (self._transport.key < peer)

    async def _run_session(self, session: Session) -> None:
        peer = session.peer
        reading = Reading(
            self._loop.post, self._large, lambda: self._max_message_bytes(peer, session.dialed), self._loop.charge
        )
        await session.run_streams(
            lambda: self._transport.open_stream(peer, Lane.BULK),
            lambda: self._transport.target_connections(peer),
            reading,
        )

    def _max_message_bytes(self, peer: bytes, dialed: bool) -> int:
        """How long a control message of this peer may be now. `dialed`: this member opened the session."""
        if not (dialed or peer == self._authority or self._admits(peer)):
            return self._limits.stranger_message_bytes
        is_authority = self._transport.key == self._authority
        return self._limits.seed_message_bytes if is_authority else self._limits.message_bytes

    async def _judge(self, source: Source, peer: bytes, session: Session, work: Callable[[], Awaitable[None]]) -> str:
        """Run a part of a session and decide what its error means. Returns why it failed; empty if it did not."""
        with guarded(source, peer) as outcome:
            await work()
        if outcome.is_rule_broken:
            self._counts.peers_dropped += 1
            await self._loop.post(PieceBad(peer, outcome.why))
        elif outcome.error is not None:
            _log.info("session_lost", peer=peer, why=outcome.why, for_s=trio.current_time() - session.since_s)
        return outcome.why

    # ------------------------------------------------------------ bulk streams of a peer

    async def _read_bulk(self, peer: bytes, stream: Stream) -> None:
        """Read a bulk stream of a peer that has shown a grant. When there are too many, the oldest one is cancelled."""
        if not self._is_admitted(peer):  # its control stream may come over a slower connection
            await self._wait_until_admitted(peer)
        session = self._sessions.get(peer)
        if session is None or not self._admits(peer):
            return
        streams = self._bulk_in.setdefault(peer, [])
        if len(streams) >= self._limits.bulk_streams_in:
            streams.pop(0).cancel()
        with trio.CancelScope() as scope:
            streams.append(scope)
            broken = await self._judge(
                Source.BULK, peer, session, lambda: self._inbound.read_stream(stream, peer, self._requests_of)
            )
            if broken and peer in self._sessions:
                self._sessions[peer].end(broken)
        if scope in streams:
            streams.remove(scope)
        if not streams and self._bulk_in.get(peer) is streams:
            del self._bulk_in[peer]

    def _requests_of(self, peer: bytes) -> Requests | None:
        """The open requests of the present session: a bulk stream may outlive the session in which it was opened."""
        session = self._sessions.get(peer)
        return None if session is None else session.requests

    async def _wait_until_admitted(self, peer: bytes) -> None:
        """Return when `peer` has a session and the core has admitted it, or after `dial_deadline_s`.

        Strangers may open a thousand such streams, so none of them may wake before there is something for it to do.
        """
        early = self._early.get(peer)
        if early is None or early.is_set():
            early = self._early[peer] = trio.Event()
        try:
            with trio.move_on_after(self._limits.dial_deadline_s):
                await early.wait()
        finally:
            if not early.statistics().tasks_waiting and self._early.get(peer) is early:
                del self._early[peer]

    def event_applied(self, owner: bytes) -> None:
        """The core has applied an event of this peer, or one of ours, and may have admitted a peer."""
        for peer in (owner,) if owner != OURS else list(self._early):
            if peer in self._early and self._is_admitted(peer):
                self._early[peer].set()

    def _is_admitted(self, peer: bytes) -> bool:
        return peer in self._sessions and self._admits(peer)
