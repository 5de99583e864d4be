"""What a member measures of its neighbours: how fast verified bytes came from each, and the round trip.

Bandwidth is measured where it arrives: what a node claims of itself is a limit, never a merit. A newcomer, who has no
children, is tried by one of its parents: asked for a chunk that the parent has already.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median

from swarm.protocol.core.documents import MAX_LINKS, UNTIMED, Link
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import WantChunk
from swarm.protocol.state import State
from swarm.protocol.transfer.chunks import Chunk

__all__ = ["Links"]

MIN_BYTES = 64 << 10
"""Of less than this no rate is made: it may have come in one burst out of a buffer."""
MIN_TOTAL_BYTES = 2 << 20
"""Of a version smaller than this, who brought which part of it is chance."""
LEAST_S = 0.5
LEAST_TRIPS = 20
"""Nor of one that came sooner, or within so many round trips to the farthest parent: windows grow for half as many, and
a parent whose own parent was slow to begin is not slow."""
MAX_KBIT_S = 10_000_000_000
GAP_S = 0.25
"""A pause longer than this is not counted as sending: there was nothing to send."""


@dataclass(slots=True)
class _Flow:
    all_bytes: int = 0
    timed_bytes: int = 0
    busy_s: float = 0.0
    last_at: float = float("-inf")

    def add(self, size: int, now: float) -> None:
        gap = now - self.last_at
        if gap < GAP_S:
            self.busy_s += gap
            self.timed_bytes += size
        self.all_bytes += size
        self.last_at = now

    @property
    def kbit_s(self) -> int:
        """While it was sending; as `Link` has it."""
        if self.timed_bytes < MIN_BYTES or self.busy_s <= 0:
            return UNTIMED if self.all_bytes else 0
        return max(UNTIMED, min(int(self.timed_bytes * 0.008 / self.busy_s), MAX_KBIT_S))


class Links:
    """Of one member."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._flows: dict[bytes, _Flow] = {}
        self._all = _Flow()
        """From everybody together."""
        self._tried: dict[bytes, float] = {}
        """Newcomers that we asked for a chunk, and when."""
        self._awaited: set[bytes] = set()
        """Of them, those of whom nothing has come since."""
        self._tried_one = False
        """One of them answered: worth a report."""

    def came(self, peer: bytes | None, size: int, now: float) -> None:
        """`size` verified bytes of a chunk came from `peer`."""
        if peer is None:
            return
        flow = self._flows.get(peer)
        if flow is None:
            flow = self._flows[peer] = _Flow()
            self._tried_one = self._tried_one or peer in self._awaited
            self._awaited.discard(peer)
        for each in (flow, self._all):
            each.add(size, now)

    def take_answered(self) -> bool:
        """Whether a newcomer has answered since the last call: what was measured of it is worth a report."""
        answered, self._tried_one = self._tried_one, False
        return answered

    def account(self) -> tuple[Link, ...]:
        """What was measured since the last time."""
        made: list[Link] = []
        roster = self._state.roster
        short = self._short()
        for session in self._state.sessions:
            member = roster.member_of(session.peer) if roster is not None else None
            flow = self._flows.get(session.peer, _Flow())
            if member is None or not (session.rtt_s or flow.all_bytes):
                continue
            rtt_ms = min(60_000, int(1000 * session.rtt_s + 0.999))
            made.append(Link(member.slot, flow.kbit_s, short.get(session.peer, 0), rtt_ms))
        self._flows.clear()
        self._all = _Flow()
        return tuple(sorted(made, key=lambda link: (-link.kbit_s, link.slot))[:MAX_LINKS])

    def _short(self) -> dict[bytes, int]:
        """By parent: how many percent less it brought than its part of the version, or slower than most parents."""
        stripes = self._state.roster.stripes if self._state.roster is not None else 1
        feeds = Counter(edge.peer for edge in self._state.exchange.parents.values())
        trip_s = max((session.rtt_s for session in self._state.sessions if session.peer in feeds), default=0.0)
        total = self._all.all_bytes
        if total < MIN_TOTAL_BYTES or self._all.busy_s < max(LEAST_S, LEAST_TRIPS * trip_s):
            return {}
        paces = [self._flows[p].kbit_s / n for p, n in feeds.items() if self._timed(p)]
        pace = median(paces) if paces else 0.0
        short: dict[bytes, int] = {}
        for peer, n in feeds.items():
            flow = self._flows.get(peer, _Flow())
            part = min(1.0, flow.all_bytes * stripes / (total * n))
            speed = min(1.0, flow.kbit_s / (pace * n)) if pace and self._timed(peer) else 1.0
            short[peer] = 100 - int(100 * min(part, speed))
        return short

    def _timed(self, peer: bytes) -> bool:
        return peer in self._flows and self._flows[peer].kbit_s > UNTIMED

    # ------------------------------------------------------------ newcomers

    def try_newcomers(self, now: float) -> None:
        """Ask a leaf of ours that has uplink to give, and holds a version, for one chunk of it."""
        state, roster, grant = self._state, self._state.roster, self._state.grant
        if roster is None or grant is None:
            return
        for stripe, edges in state.exchange.children.items():
            for peer in edges:
                member = roster.member_of(peer)
                if member is None or not member.leaf or member.up_mbit == 0 or member.slot % roster.stripes != stripe:
                    continue
                if now - self._tried.get(peer, float("-inf")) < state.tuning.soft_ttl_s:
                    continue
                chunk = self._a_chunk(state.held)
                if chunk is not None:
                    self._tried = {p: at for p, at in self._tried.items() if now - at < state.tuning.soft_ttl_s}
                    self._tried[peer] = now
                    self._awaited &= self._tried.keys()
                    self._awaited.add(peer)
                    state.outbox.send(peer, WantChunk(*chunk.key, b""))

    def _a_chunk(self, held: VersionId | None) -> Chunk | None:
        """One that we have whole, of the newest version that all should hold by now."""
        chunks = self._state.chunks
        for id_ in sorted((v for v in chunks.versions if held is not None and v <= held), reverse=True):
            for _, chunk in sorted(chunks.versions[id_].chunks.items()):
                if chunk.whole:
                    return chunk
        return None
