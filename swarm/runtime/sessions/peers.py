"""Sessions: accepted, dialed, crossed, banned, and judged when they fail.

Errors are judged here and nowhere else in this ring. A peer whose bytes do not verify, or meet a bug of ours, is
reported to the core (which bans it); one that is too slow, or whose connection broke, loses its session. What the user
can mend goes on up.
"""

from collections.abc import Awaitable, Callable, Iterator

import structlog
import trio

from swarm.guard import Source, guarded
from swarm.protocol.core.events import PeerDown, PeerUp, PieceBad, Probed
from swarm.runtime.core_loop import CoreLoop
from swarm.runtime.counts import Counts
from swarm.runtime.event_queue import OURS
from swarm.runtime.limits import Limits
from swarm.runtime.sessions.bulk import BulkStreams
from swarm.runtime.sessions.inbound import Inbound
from swarm.runtime.sessions.outbound import FindBlob, Outbound
from swarm.runtime.sessions.pacing import Pacer
from swarm.runtime.sessions.session import Session
from swarm.store import ChunkStore
from swarm.transport.base import Lane, Stream, Transport

__all__ = ["Peers"]

_BANNED = 1024
"""Bans that are kept, over or not, before those that are over are looked for."""
_log = structlog.get_logger(__name__)


class Peers:
    """The sessions of one shell, one a peer."""

    def __init__(
        self,
        transport: Transport,
        chunks: ChunkStore,
        inbound: Inbound,
        find: FindBlob,
        counts: Counts,
        limits: Limits,
        loop: CoreLoop,
        admits: Callable[[bytes], bool],
        longest: Callable[[bytes, bool], int],
    ) -> None:
        """`admits`: who has shown a grant that holds. Nothing is read from the others' bulk streams. `longest(peer,
        dialed)`: how many bytes a control message of this peer may have now; `dialed`: by us."""
        self._transport = transport
        self._chunks = chunks
        self._inbound = inbound
        self._find = find
        self._counts = counts
        self._limits = limits
        self._loop = loop
        self._post = loop.post
        self._admits = admits
        self._longest = longest
        self._sessions: dict[bytes, Session] = {}
        self._banned: dict[bytes, float] = {}
        self._prune_at = _BANNED
        self._dialing: set[bytes] = set()
        self._bulk_in: dict[bytes, list[trio.CancelScope]] = {}
        self._early: dict[bytes, trio.Event] = {}
        """Peers whose bulk streams came before their session, or before the core read their hello; set when the core
        has admitted the peer."""
        self._pacer = Pacer(limits.up_mbit, transport.departed_bytes)
        self._probing = trio.CapacityLimiter(limits.probes)
        self._large = trio.CapacityLimiter(limits.large_messages)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, peer: bytes) -> Session | None:
        return self._sessions.get(peer)

    def ban(self, peer: bytes, ban_s: float) -> None:
        """Refuse its streams for so long."""
        now = trio.current_time()
        if len(self._banned) >= self._prune_at:  # not each time: strangers can have 60,000 of their keys banned
            self._banned = {other: until for other, until in self._banned.items() if until > now}
            self._prune_at = max(_BANNED, 2 * len(self._banned))
        self._banned[peer] = now + ban_s

    async def accept(self, peer: bytes, lane: Lane, stream: Stream) -> None:
        """What the transport calls for each stream that a peer opens."""
        if self._banned.get(peer, 0.0) > trio.current_time():
            return
        if lane is Lane.BULK:
            await self._take_bulk(peer, stream)
        elif peer in self._sessions or len(self._sessions) < self._limits.sessions:
            await self._converse(peer, stream, dialed=False)

    async def dial(self, peer: bytes, addrs: tuple[str, ...]) -> None:
        """Connect and hold the session until it ends. `PeerDown(dial_failed=True)` when it cannot be had."""
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
                await self._post(PeerDown(peer, dial_failed=True, why=why))
                return
        finally:
            self._dialing.discard(peer)
        async with stream:
            await self._converse(peer, stream, dialed=True)

    async def probe(self, peer: bytes, addrs: tuple[str, ...]) -> None:
        """Dial it back at each of these addresses, and say where it answered itself."""
        answered: set[str] = set()

        async def ask(address: str) -> None:
            with guarded(Source.PROBE, peer), trio.move_on_after(self._limits.dial_deadline_s):
                if await self._transport.probe(peer, address):
                    answered.add(address)

        async with self._probing, trio.open_nursery() as nursery:
            for address in addrs:
                nursery.start_soon(ask, address)
        await self._post(Probed(peer, tuple(address for address in addrs if address in answered)))

    # ------------------------------------------------------------ one session

    async def _converse(self, peer: bytes, stream: Stream, *, dialed: bool) -> None:
        while (old := self._sessions.get(peer)) is not None:
            if not self._takes_over(old, peer, dialed):
                return
            old.crossed = True
            old.end("another session took its place")
            await old.gone.wait()
        bulk = BulkStreams(self._make_queue, self._limits, self._pacer)
        session = Session(peer, stream, dialed=dialed, bulk=bulk, counts=self._counts, limits=self._limits)
        self._sessions[peer] = session
        await self._post(PeerUp(peer, dialed, self._transport.remote_address(peer)))
        broken = await self._judged(Source.CONTROL, peer, session, lambda: self._run(session))
        del self._sessions[peer]
        if not session.crossed:
            for scope in self._bulk_in.get(peer, ()):
                scope.cancel()
            if broken or session.why:  # at a clean end the connection may be carrying the peer's next session already
                with trio.move_on_after(self._limits.flush_deadline_s):
                    await self._transport.disconnect(peer)
        await self._post(PeerDown(peer, why=broken or session.why or "closed by the peer"))
        session.gone.set()

    def _takes_over(self, old: Session, peer: bytes, dialed: bool) -> bool:
        """Whether a new session replaces the old one; both ends decide alike.

        When both dialed at once, the one that the lower key dialed stays. Two in one direction, or one long after the
        other, are no crossing: the peer has lost the old one before we noticed.
        """
        if old.dialed == dialed or trio.current_time() - old.since_s > self._limits.crossing_s:
            return True
        return dialed == (self._transport.key < peer)

    async def _take_bulk(self, peer: bytes, stream: Stream) -> None:
        """Receive what a peer that has shown a grant sends; of too many streams the oldest goes."""
        if not self._is_admitted(peer):  # its control stream may come by a slower connection
            await self._wait_until_admitted(peer)
        session = self._sessions.get(peer)
        if session is None or not self._admits(peer):
            return
        streams = self._bulk_in.setdefault(peer, [])
        if len(streams) >= self._limits.bulk_streams_in:
            streams.pop(0).cancel()
        with trio.CancelScope() as scope:
            streams.append(scope)
            broken = await self._judged(Source.BULK, peer, session, lambda: self._inbound.run(stream, peer))
            if broken and peer in self._sessions:
                self._sessions[peer].end(broken)
        if scope in streams:
            streams.remove(scope)
        if not streams and self._bulk_in.get(peer) is streams:
            del self._bulk_in[peer]

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

    def applied(self, owner: bytes) -> None:
        """The core has applied an event of this peer, or one of ours: it may have admitted somebody."""
        for peer in (owner,) if owner != OURS else list(self._early):
            if peer in self._early and self._is_admitted(peer):
                self._early[peer].set()

    def _is_admitted(self, peer: bytes) -> bool:
        return peer in self._sessions and self._admits(peer)

    async def _judged(self, source: Source, peer: bytes, session: Session, run: Callable[[], Awaitable[None]]) -> str:
        """Run a part of a session; why it failed, or nothing. The one place that decides what an error means."""
        with guarded(source, peer) as outcome:
            await run()
        if outcome.is_rule_broken:
            self._counts.peers_dropped += 1
            await self._post(PieceBad(peer, outcome.why))
        elif outcome.error is not None:
            _log.info("session_lost", peer=peer.hex()[:8], why=outcome.why, for_s=trio.current_time() - session.since_s)
        return outcome.why

    def _make_queue(self, hold: Callable[[], bool]) -> Outbound:
        return Outbound(self._chunks, self._find, self._counts, self._limits, hold)

    async def _run(self, session: Session) -> None:
        async def open_bulk() -> Stream:
            return await self._transport.open_stream(session.peer, Lane.BULK)

        await session.run(
            open_bulk,
            lambda: self._transport.target_connections(session.peer),
            self._post,
            large=self._large,
            most=lambda: self._longest(session.peer, session.dialed),
            charge=self._loop.charge,
        )
