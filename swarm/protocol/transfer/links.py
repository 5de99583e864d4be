"""A member's measurements of its neighbours: the rate of verified bytes from each, and the round-trip time.

The receiver measures bandwidth; the uplink that a node claims is only an upper limit. A newcomer has no children that
could measure it, so one of its parents tests it: it asks the newcomer for a chunk that it already has.
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
"""Fewer bytes give no rate: they may have come in one burst from a buffer."""
MIN_TOTAL_BYTES = 2 << 20
"""In a smaller version, the share that each parent brings is random."""
LEAST_S = 0.5
"""Shares are not judged for a version that arrived in less time."""
LEAST_TRIPS = 20
"""Nor in less than this number of round trips to the farthest parent: windows grow during half of them, and a parent
whose own parent started late is not slow."""
MAX_KBIT_S = 10_000_000_000
GAP_S = 0.25
"""A longer pause does not count as sending time: there was nothing to send."""


@dataclass(slots=True)
class _Flow:
    """Bytes from one peer, and the time that they took."""

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
        """The rate while the peer was sending, in kbit/s, as in `Link`."""
        if self.timed_bytes < MIN_BYTES or self.busy_s <= 0:
            return UNTIMED if self.all_bytes else 0
        return max(UNTIMED, min(int(self.timed_bytes * 0.008 / self.busy_s), MAX_KBIT_S))


class Links:
    """The measurements of one member."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._flows: dict[bytes, _Flow] = {}
        self._all = _Flow()
        """From all peers together."""
        self._tried: dict[bytes, float] = {}
        """Newcomers that were asked for a chunk, and the local time of asking."""
        self._awaited: set[bytes] = set()
        """Those of `_tried` that have not sent anything since."""
        self._newcomer_answered = False
        """A newcomer has answered, so a report is due."""

    def count_bytes(self, peer: bytes | None, size: int, now: float) -> None:
        """Count `size` verified bytes of a chunk from `peer`."""
        if peer is None:
            return
        flow = self._flows.get(peer)
        if flow is None:
            flow = self._flows[peer] = _Flow()
            self._newcomer_answered = self._newcomer_answered or peer in self._awaited
            self._awaited.discard(peer)
        for measured in (flow, self._all):
            measured.add(size, now)

    def take_answered(self) -> bool:
        """Whether a newcomer has answered since the last call: what was measured of it is worth a report."""
        answered, self._newcomer_answered = self._newcomer_answered, False
        return answered

    def take_measurements(self) -> tuple[Link, ...]:
        """The measurements since the last call."""
        links: list[Link] = []
        roster = self._state.roster
        short = self._short()
        for session in self._state.sessions:
            member = roster.member_of(session.peer) if roster is not None else None
            flow = self._flows.get(session.peer, _Flow())
            if member is None or not (session.rtt_s or flow.all_bytes):
                continue
            rtt_ms = min(60_000, int(1000 * session.rtt_s + 0.999))
            links.append(Link(member.slot, flow.kbit_s, short.get(session.peer, 0), rtt_ms))
        self._flows.clear()
        self._all = _Flow()
        return tuple(sorted(links, key=lambda link: (-link.kbit_s, link.slot))[:MAX_LINKS])

    def _short(self) -> dict[bytes, int]:
        """By parent: the percentage by which its bytes (of its share) or its rate (of the median) fell short."""
        stripes = self._state.roster.stripes if self._state.roster is not None else 1
        feeds = Counter(edge.peer for edge in self._state.exchange.parents.edges.values())
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
        """Ask each of our leaves that claims an uplink for one chunk that it should hold, once per `soft_ttl_s`."""
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
        """A complete chunk of the newest version that we hold, which the leaf should hold too."""
        chunks = self._state.chunks
        for id_ in sorted((v for v in chunks.versions if held is not None and v <= held), reverse=True):
            for _, chunk in sorted(chunks.versions[id_].chunks.items()):
                if chunk.whole:
                    return chunk
        return None
