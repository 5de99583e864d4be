"""The exchange: pushes pieces down the trees with cut-through and credit. `parents` is the other end of the edges.

A child attaches to a parent for one stripe and tells which chunks it has. From then on the parent pushes every piece of
that stripe as soon as it holds it, as far as the child's *credit* reaches.

With its credit a child reports how far *behind* its own children are. No peer stops for that: pieces are kept and sent
in turn. But the authority assigns the next chunk to a stripe that is not behind.

Headers are sent ahead of pieces, so a child knows at once which chunks its parent will bring. It gets late chunks from
neighbours with spare uplink (see `repair`), and then tells the parent to *skip* them. A child that holds a shard of the
model gets headers only, and asks for the chunks that it needs: for its parent, all others are skipped.

A *late joiner* gets pieces only while little is queued for the other children and at our uplink. Late joiners are the
children that joined during the version in flight, and those to which the plan gives another parent that is present;
otherwise members that attach to every peer would take the uplinks of planned children.

A child that takes nothing for `lag_after_s` although something is queued for it (sooner, if it was fast before) is
*lagging*: it does not count as behind any more, and pulls what it lacks.
"""

import math
from collections import Counter
from collections.abc import Iterable

from codec import ChunkKey
from swarm.protocol.core.events import Ready, SendHeader, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Attach, Credit
from swarm.protocol.transfer.chunks import Chunk, Chunks, mask_of
from swarm.protocol.transfer.edges import ChildEdge, Part
from swarm.protocol.transfer.exchange_context import ExchangeContext
from swarm.protocol.transfer.parents import Parents

__all__ = ["Exchange"]

HEADER = -1
"""The index of a chunk's header in queues."""
MAX_AHEAD_BYTES = 256 << 10
"""Bytes that may be handed to a child's socket and not accepted yet, plus one piece, regardless of its credit. What is
handed over cannot be skipped any more, and arrives twice if another peer brings it too."""
LAG_LEAST_S = 0.5
LAG_TIMES = 10
"""A child lags if it takes nothing for `LAG_TIMES` its usual time, and at least `LAG_LEAST_S`."""


class Exchange:
    """The edges of one peer: to its children here, to its parents in `parents`."""

    def __init__(
        self,
        chunks: Chunks,
        tuning: Tuning,
        outbox: Outbox,
        around: ExchangeContext = ExchangeContext(),  # noqa: B008 - frozen
        *,
        gives: bool = True,
    ) -> None:
        """`gives`: whether this machine has uplink to give; see `give`."""
        self._uplink = around.uplink
        self._late_joiners = around.late_joiners
        self._entitled = around.entitled
        self._chooses = around.chooses
        self._egress_budget = around.egress_budget
        self._late_joiner_edges: dict[tuple[int, bytes], ChildEdge] = {}
        """The edges to late joiners, by stripe and peer."""
        self._chunks = chunks
        self._tuning = tuning
        self._outbox = outbox
        self.children: dict[int, dict[bytes, ChildEdge]] = {}
        self.parents = Parents(chunks, tuning, outbox, around.rtt_s, self._behind)
        self._gives = gives
        self._copies: Counter[ChunkKey] = Counter()
        """The number of children to which each chunk is being or was sent."""

    def attached(self, peer: bytes, message: Attach, now: float) -> None:
        """A child attached: queue what it lacks of what we hold, and push from now on."""
        after = VersionId(message.epoch, message.version)
        if not any(peer in edges for edges in self.children.values()):
            self._outbox.emit(Ready(peer))
        edge = ChildEdge(peer, after, message.credit, moved_at=now, chooses=self._chooses(peer))
        old = self.children.setdefault(message.stripe, {}).get(peer)
        if old is not None:  # what was handed over is still on its way
            edge.flying, edge.flying_bytes = old.flying, old.flying_bytes
            self._refund(peer, old.waiting)
        self.children[message.stripe][peer] = edge
        self._late_joiner_edges.pop((message.stripe, peer), None)
        if self._is_late_joiner(message.stripe, peer):
            edge.late_joiner = True
            self._late_joiner_edges[message.stripe, peer] = edge
        has = {ChunkKey(h.epoch, h.version, h.attempt, h.seq): h.pieces for h in message.have}
        for id_ in sorted(self._chunks.versions):
            if id_ <= after:
                continue
            for _, chunk in sorted(self._chunks.versions[id_].chunks.items()):
                if chunk.stripe != message.stripe:
                    continue
                given = mask_of(has[chunk.key], chunk.full) if chunk.key in has else 0
                if chunk.key not in has:
                    sent = self._push_header(peer, message.stripe, edge, chunk, now)
                    if not sent or edge.chooses:
                        continue
                elif edge.chooses and given == chunk.full:  # it has all, or needs none
                    edge.skipped.add(chunk.key)
                for index in chunk.held():
                    if not given >> index & 1:
                        self._enqueue(edge, chunk, index, now)
        self._push_more(peer, message.stripe, edge, now)

    def _is_late_joiner(self, stripe: int, peer: bytes) -> bool:
        return (self._late_joiners is not None and self._late_joiners.has(peer)) or not self._entitled(stripe, peer)

    def _review(self) -> None:
        """Determine again which children are late joiners."""
        self._late_joiner_edges.clear()
        for stripe, edges in self.children.items():
            for peer, edge in edges.items():
                edge.late_joiner = self._is_late_joiner(stripe, peer)
                if edge.late_joiner:
                    self._late_joiner_edges[stripe, peer] = edge

    def review(self, now: float) -> None:
        """The plan has changed, or a member has left or returned: serve children that are not late joiners any more."""
        before = list(self._late_joiner_edges.items())
        self._review()
        for (stripe, peer), edge in before:
            if not edge.late_joiner and self.children.get(stripe, {}).get(peer) is edge:
                self._pump(peer, stripe, edge, now)

    def detached(self, peer: bytes, stripe: int | None) -> None:
        """A child left one stripe, or (None) all of them."""
        for k in [stripe] if stripe is not None else list(self.children):
            if (edge := self.children.get(k, {}).pop(peer, None)) is not None:
                self._late_joiner_edges.pop((k, peer), None)
                self._refund(peer, edge.waiting)
                self.parents.report_not_behind(k)

    def _behind(self, stripe: int) -> int:
        """Bytes queued for a child of this stripe, on average. Not the maximum, since of many nodes a few are always
        late."""
        children = self.children.get(stripe, {}).values()
        waiting = [child.backlog for child in children if not child.lagging and not child.late_joiner]
        return sum(waiting) // len(waiting) if waiting else 0

    def credited(self, peer: bytes, message: Credit, now: float) -> None:
        """A child grants credit. A smaller total is ignored, since credit is never revoked."""
        edge = self.children.get(message.stripe, {}).get(peer)
        if edge is not None:
            edge.behind = message.behind
        if edge is not None and message.total > edge.allowed:
            edge.allowed = message.total
            if edge.flying_bytes == 0:
                edge.moved_at = now
            self._push_more(peer, message.stripe, edge, now)

    def push(self, chunk: Chunk, index: int, source: bytes | None, now: float) -> None:
        """We hold this header (index -1) or piece now: queue it for every child of its stripe, except `source`."""
        if chunk.stripe is None:
            return
        if index == HEADER and chunk.sizes:
            self.parents.note_piece_size(chunk.sizes[0])
        id_ = VersionId(chunk.key.epoch, chunk.key.version)
        if index == HEADER and self._late_joiners is not None and self._late_joiners.opened(id_, now):
            self._review()
        for peer, edge in self.children.get(chunk.stripe, {}).items():
            if peer == source or id_ <= edge.after or chunk.key in edge.skipped or chunk.key in edge.unpaid:
                continue
            if index == HEADER:
                self._push_header(peer, chunk.stripe, edge, chunk, now)
            elif self._enqueue(edge, chunk, index, now) and not edge.late_joiner:
                self._pump(peer, chunk.stripe, edge, now)
        if index != HEADER:
            self.serve_late_joiners(now)

    def sent(self, peer: bytes, stripe: int, key: ChunkKey, index: int, now: float) -> None:
        """The socket to a child accepted this part, so it does not count as backlog any more."""
        edge = self.children.get(stripe, {}).get(peer)
        size = edge.flying.pop((key, index), None) if edge is not None else None
        if edge is None or size is None:
            return
        edge.flying_bytes -= size
        if index != HEADER:  # headers do not wait for the child
            edge.pace_s += 0.1 * (now - edge.moved_at - edge.pace_s)
            edge.moved_at = now
            edge.lagging = False
        self._push_more(peer, stripe, edge, now)
        self.parents.report_not_behind(stripe)

    def gave(self, peer: bytes, chunk: Chunk, pieces: Iterable[int], now: float) -> None:
        """We answer a pull of `peer`. If it is a child, it counts these bytes against its credit, so we do too."""
        size = chunk.header_bytes + sum(chunk.sizes[index] for index in pieces)
        self._uplink.take(size, now)
        edge = self.children.get(chunk.stripe, {}).get(peer) if chunk.stripe is not None else None
        if edge is not None:
            edge.sent += size

    def paid(self, peer: bytes, chunk: Chunk, pieces: Iterable[int]) -> list[int]:
        """Pay for the header and these pieces, which `peer` pulls; the pieces that may be sent."""
        if self._egress_budget is None:
            return list(pieces) if self._gives else []
        if not self._egress_budget.pay_for_part(chunk.key, HEADER, chunk.header_bytes, peer):
            return []
        paid = [
            index for index in pieces if self._egress_budget.pay_for_part(chunk.key, index, chunk.sizes[index], peer)
        ]
        if not paid:
            self._egress_budget.refund_part(chunk.key, HEADER, chunk.header_bytes, peer)
        return paid

    def paid_header(self, peer: bytes, chunk: Chunk) -> bool:
        """Pay for the header of a chunk, which `peer` pulls alone; whether it may be sent."""
        if self._egress_budget is None:
            return self._gives
        return self._egress_budget.pay_for_part(chunk.key, HEADER, chunk.header_bytes, peer)

    def spare(self, stripe: int, peer: bytes) -> int:
        """Bytes of credit that this child has to spare; -1 if it is not attached."""
        edge = self.children.get(stripe, {}).get(peer)
        return -1 if edge is None else edge.spare

    @property
    def gives(self) -> bool:
        """Whether this machine has uplink to give today; otherwise what is queued stays queued."""
        return self._gives

    def give(self, gives: bool, now: float) -> None:
        """Set whether this machine has uplink to give."""
        self._gives = gives
        for stripe, edges in self.children.items():
            for peer, edge in edges.items():
                if not edge.late_joiner:
                    self._pump(peer, stripe, edge, now)
        self.serve_late_joiners(now)

    def tick(self, now: float) -> None:
        """Find children that are lagging."""
        for stripe, edges in self.children.items():
            for edge in edges.values():
                limit_s = min(self._tuning.lag_after_s, max(LAG_LEAST_S, LAG_TIMES * edge.pace_s))
                stuck = edge.backlog > 0 and now - edge.moved_at > limit_s
                if stuck and not edge.lagging:
                    edge.lagging = True
                    self.parents.report_not_behind(stripe)
        self.serve_late_joiners(now)

    def skip(self, peer: bytes, stripe: int, key: ChunkKey) -> None:
        """A child gets this chunk from another peer: remove what has not been handed over."""
        edge = self.children.get(stripe, {}).get(peer)
        if edge is None or self._chunks.find(key) is None:  # otherwise keys that a child invents would fill memory
            return
        edge.skipped.add(key)
        self._refund(peer, edge.remove_waiting(lambda chunk, index: chunk.key == key and index != HEADER))

    def is_choice(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether `peer` is a child that has not asked for this chunk yet, whose header it has."""
        chunk = self._chunks.find(key)
        edge = None if chunk is None or chunk.stripe is None else self.children.get(chunk.stripe, {}).get(peer)
        return edge is not None and edge.chooses and key in edge.skipped

    def take_back(self, peer: bytes, chunk: Chunk, pieces: int, now: float) -> bool:
        """Queue pieces of a skipped chunk that the child did not get elsewhere; False if it was not skipped."""
        edge = self.children.get(chunk.stripe, {}).get(peer) if chunk.stripe is not None else None
        if edge is None or chunk.stripe is None or chunk.key not in edge.skipped:
            return False
        edge.skipped.discard(chunk.key)
        for index in chunk.held():
            if pieces >> index & 1:
                self._enqueue(edge, chunk, index, now)
        self._push_more(peer, chunk.stripe, edge, now)
        return True

    @property
    def waiting_bytes(self) -> int:
        """Bytes queued for all children but late joiners."""
        edges = (edge for edges in self.children.values() for edge in edges.values())
        return sum(edge.waiting_bytes for edge in edges if not edge.late_joiner)

    @property
    def has_backlog(self) -> bool:
        """Whether something is queued for a child, or on its way to it."""
        return any(edge.backlog for edges in self.children.values() for edge in edges.values())

    def has_time(self, now: float) -> bool:
        """Whether late joiners may be served: little is queued for the others and at the uplink, so that pieces for the
        others would still leave soon."""
        little = self._little_bytes
        edges = (edge for edges in self.children.values() for edge in edges.values())
        waiting = sum(edge.waiting_bytes for edge in edges if not edge.late_joiner and not edge.lagging)
        return waiting < little and self._uplink.queued_bytes(now) < little

    @property
    def _little_bytes(self) -> float:
        return max(1.0, self._tuning.idle_s * self._uplink.bytes_s())

    def forget(self, id_: VersionId) -> None:
        """A version was dropped: remove its parts from all queues."""
        for key in [key for key in self._copies if (key.epoch, key.version) == id_]:
            del self._copies[key]
        for edges in self.children.values():
            for edge in edges.values():
                edge.forget(id_)

    def _enqueue(self, edge: ChildEdge, chunk: Chunk, index: int, now: float) -> bool:
        """Queue a part; False if the egress budget does not allow it. No piece is sent without its header."""
        size = _size(chunk, index)
        if self._egress_budget is not None and not self._egress_budget.pay_for_part(chunk.key, index, size, edge.peer):
            if index == HEADER:
                edge.unpaid.add(chunk.key)
            return False
        if edge.backlog == 0:
            edge.moved_at = now  # its lag counts from here
        edge.append_waiting(chunk, index, size)
        return True

    def _push_header(self, peer: bytes, stripe: int, edge: ChildEdge, chunk: Chunk, now: float) -> bool:
        """Send a chunk's header at once, ahead of the queue and of credit; False if the egress budget forbids it.

        A child that has the header can get the chunk elsewhere.
        """
        if not self._enqueue(edge, chunk, HEADER, now):
            return False
        if edge.chooses:
            edge.skipped.add(chunk.key)
        if self._gives and edge.flying_bytes < MAX_AHEAD_BYTES:
            edge.pop_last_waiting()
            self._hand_over(peer, stripe, edge, chunk, HEADER, now)
        return True

    def _refund(self, peer: bytes, waiting: Iterable[Part]) -> None:
        """Refund parts that are not sent."""
        if self._egress_budget is not None:
            for chunk, index, size in waiting:
                self._egress_budget.refund_part(chunk.key, index, size, peer)

    def _pump(
        self,
        peer: bytes,
        stripe: int,
        edge: ChildEdge,
        now: float,
        most_queued: float = math.inf,
    ) -> None:
        """Hand over queued parts as far as credit reaches, while less than `most_queued` bytes wait at our uplink."""
        while self._gives and edge.waiting and edge.sent + edge.waiting[0][2] <= edge.allowed:
            if edge.flying_bytes >= MAX_AHEAD_BYTES or self._uplink.queued_bytes(now) >= most_queued:
                return
            if edge.waiting[0][0].key != edge.current:
                self._choose(edge)
            chunk, index = edge.pop_first_waiting()
            self._hand_over(peer, stripe, edge, chunk, index, now)

    def _push_more(self, peer: bytes, stripe: int, edge: ChildEdge, now: float) -> None:
        if not edge.late_joiner:
            self._pump(peer, stripe, edge, now)
        self.serve_late_joiners(now)

    def serve_late_joiners(self, now: float) -> None:
        """Serve late joiners, those that got least first.

        `has_time` is computed once and not for each, so that members that attach to every peer cost little.
        """
        waiting = [
            (edge.sent, stripe, peer) for (stripe, peer), edge in self._late_joiner_edges.items() if edge.waiting
        ]
        if not waiting or not self.has_time(now):
            return
        for _, stripe, peer in sorted(waiting):
            self._pump(peer, stripe, self._late_joiner_edges[stripe, peer], now, self._little_bytes)

    def _choose(self, edge: ChildEdge) -> None:
        """Choose the child's next chunk: of the complete ones queued, that which the fewest children got.

        If we cannot keep up, the children then have different chunks, and can help one another.
        """
        waiting = dict.fromkeys(chunk.key for chunk, _, _ in edge.waiting if chunk.whole)
        if len(waiting) > 1:
            first = min(waiting, key=lambda key: self._copies[key])
            if first != edge.waiting[0][0].key:
                edge.move_to_front(first)
        edge.current = edge.waiting[0][0].key
        self._copies[edge.current] += 1

    def _hand_over(self, peer: bytes, stripe: int, edge: ChildEdge, chunk: Chunk, index: int, now: float) -> None:
        """Hand a part to the runtime."""
        key, size = chunk.key, _size(chunk, index)
        self._uplink.take(size, now)
        edge.sent += size
        edge.flying_bytes += size - edge.flying.get((key, index), 0)
        edge.flying[key, index] = size
        if index == HEADER:
            self._outbox.emit(SendHeader(peer, stripe, key))
        else:
            self._outbox.emit(SendPiece(peer, stripe, key, index, late_joiner=edge.late_joiner))


def _size(chunk: Chunk, index: int) -> int:
    return chunk.header_bytes if index == HEADER else chunk.sizes[index]
