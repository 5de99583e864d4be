"""Pieces down the trees: edges to children, credit, cut-through, and what is given back to parents.

A child attaches to a parent for one stripe and says what it has. From then on the parent pushes every piece of that
stripe as soon as it holds it, as far as the child's *credit* reaches. The child grants what a stripe brings in a round
trip and then some, and as much again as comes in: a socket's acceptance is not progress, credit is. Small windows keep
the queues of a shared uplink short and its children in step; large ones let whoever has the shortest way take what the
others wait for.

With its credit a child says how far *behind* its own children are. Nobody stops for that (what has come is kept and
passed on when its turn comes), but the authority deals the next chunk to a stripe that is not behind.

Headers run ahead of pieces: a child knows at once what its parent is to bring, and gets what comes late from whoever
has uplink to spare (see `load_shedding`). It then tells the parent to *skip* the chunk.

A *guest* is given pieces while little waits for the others, and our uplink has little to send. A child is one that
came in the middle of a version, or that the plan hangs on somebody else who is there: else members that attach to
everybody would take the uplinks of those who have a right to them.

A child that takes nothing while something waits for it, for `lag_after_s` or sooner if it was quick, is *lagging*: it
counts no more among those that are behind, and it pulls what it lacks.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable

from codec import ChunkKey
from swarm.protocol.core.events import Ready, SendHeader, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import Attach, Credit, Detach
from swarm.protocol.transfer.chunks import Chunk, Chunks, mask_of
from swarm.protocol.transfer.edges import BEHIND_BYTES, ChildEdge, ParentEdge
from swarm.protocol.transfer.surroundings import Surroundings

__all__ = ["Exchange"]

HEADER = -1
"""The index under which a chunk's header queues."""
MAX_AHEAD_BYTES = 256 << 10
"""No child is sent more than this and a piece ahead of what its socket took, whatever credit it gives: what has been
handed over cannot be skipped, and comes twice if another brings it."""
FAR_S = 0.05
FAR_TIMES = 2
"""Over a round trip longer than this, a parent that owes half as much again as its window gets one so many times as
large: a stream gets to its rate late there, and often a whole region hangs on it, so that nobody near can help. With no
more credit than the rate itself it would never make that good."""
CREDIT_STEP_BYTES = 128 << 10
"""Credit is given in steps of a quarter window or this, whichever is more: two pieces a message."""
LAG_LEAST_S = 0.5
LAG_TIMES = 10
"""A child that takes nothing for ten times as long as it usually needs, and at least half a second, lags."""
FAILOVER_PATIENCE_S = 0.4
"""Who takes a lost parent's place brings what it has within this; the rest is asked of others."""


class Exchange:
    """The edges of one peer."""

    def __init__(
        self,
        chunks: Chunks,
        tuning: Tuning,
        outbox: Outbox,
        around: Surroundings = Surroundings(),  # noqa: B008 - frozen
        *,
        gives: bool = True,
    ) -> None:
        """`gives`: whether this machine has uplink to give; see `give`."""
        self._rtt_s = around.rtt_s
        self._uplink = around.uplink
        self._late_joiners = around.late_joiners
        self._entitled = around.entitled
        self._egress_budget = around.egress_budget
        self._late_joiner_edges: dict[tuple[int, bytes], ChildEdge] = {}
        """By stripe and peer."""
        self._chunks = chunks
        self._tuning = tuning
        self._outbox = outbox
        self.children: dict[int, dict[bytes, ChildEdge]] = {}
        self.parents: dict[int, ParentEdge] = {}
        self._piece_bytes = 0
        """Of the newest chunk that we heard of."""
        self._gives = gives
        self._owed_bytes: dict[int, int] = {}
        """By stripe: bytes whose headers have come and which have not; see `note_owed`."""
        self._copies: Counter[ChunkKey] = Counter()
        """How many children were begun to be given each chunk."""
        self.progress_at: dict[int, float] = {}
        """Local time at which each stripe last brought something; earlier, where we wait for less than usual before we
        pull."""
        self._patient_s: dict[int, float] = {}
        """How long, by stripe."""

    # ------------------------------------------------------------ as a child

    def attach_to(self, stripe: int, peer: bytes, after: VersionId, now: float, *, failover: bool = False) -> None:
        """Hang on `peer` for this stripe, and on nobody else. `failover`: in place of one that is lost, so it may well
        not have what that one owed us: that is pulled soon."""
        old = self.parents.get(stripe)
        if old is not None and old.peer != peer:
            self._outbox.send(old.peer, Detach(stripe))
        window = self._window(stripe, peer)
        self.parents[stripe] = ParentEdge(peer, 0, window, now)
        self._patient_s[stripe] = (
            max(FAILOVER_PATIENCE_S, 3 * self._rtt_s(peer)) if failover else self._tuning.pull_after_s
        )
        self._moved(stripe, now)
        self._outbox.send(peer, Attach(stripe, after.epoch, after.version, window, self._chunks.haves(after)))

    def _window(self, stripe: int, peer: bytes) -> int:
        """Credit for an edge: what a stripe brings in a round trip, and then some. A larger one would only fill the
        queues of the way, and let this child take what its siblings wait for; but over a long way whoever is behind has
        to catch up."""
        tuning = self._tuning
        rtt_s = self._rtt_s(peer)
        least = max(tuning.window_least_bytes, 2 * self._piece_bytes)
        window = least + int(tuning.stripe_bytes_s * ((rtt_s or tuning.rtt_guess_s) + 0.02))
        if rtt_s > FAR_S and 2 * self._owed_bytes.get(stripe, 0) > 3 * window:
            window *= FAR_TIMES
        return min(tuning.window_bytes, window)

    @property
    def patient_s(self) -> float:
        """For how long chunks may be unheard of that others got past: who lost a parent lost headers with it."""
        return min(self._patient_s.values(), default=self._tuning.pull_after_s)

    def _moved(self, stripe: int, now: float) -> None:
        patient_s = min(self._patient_s.get(stripe, self._tuning.pull_after_s), self._tuning.pull_after_s)
        self.progress_at[stripe] = now + patient_s - self._tuning.pull_after_s

    def parent(self, stripe: int) -> bytes | None:
        """Who pushes this stripe to us."""
        edge = self.parents.get(stripe)
        return None if edge is None else edge.peer

    def note_owed(self, stripe: int, size: int) -> None:
        """Our parent in this stripe owes us `size` bytes: a far one that owes much gets more credit."""
        self._owed_bytes[stripe] = size

    def lost_parent(self, peer: bytes) -> list[int]:
        """The stripes that hung on `peer`, which is gone."""
        stripes = [s for s, edge in self.parents.items() if edge.peer == peer]
        for stripe in stripes:
            del self.parents[stripe]
        return stripes

    def arrived(self, peer: bytes | None, stripe: int | None, size: int, now: float) -> None:
        """`size` bytes of a stripe came in from `peer` (a duplicate counts too: its credit is used up).

        `stripe` is what the frame says, which nobody has signed: it counts only between us and our parent there.
        """
        edge = self.parents.get(stripe) if stripe is not None else None
        if stripe is not None and edge is not None and edge.peer == peer:
            edge.received += size
            self._moved(stripe, now)
            self.give_credit(stripe)

    def moved(self, stripe: int | None, now: float) -> None:
        """A header or piece of this stripe came that we did not have, from anybody: nothing of it is pulled yet."""
        if stripe is not None:
            self._moved(stripe, now)

    def give_credit(self, stripe: int) -> None:
        """Allow our parent as much again as has come, and tell it how far behind our own children are."""
        edge = self.parents.get(stripe)
        if edge is None or edge.received + self._tuning.window_bytes < edge.allowed + CREDIT_STEP_BYTES:
            return
        window = self._window(stripe, edge.peer)
        allowed = edge.received + window
        if allowed >= edge.allowed + max(window // 4, CREDIT_STEP_BYTES):
            edge.allowed, edge.behind = allowed, self._behind(stripe)
            self._outbox.send(edge.peer, Credit(stripe, allowed, edge.behind))

    def _tell_behind(self, stripe: int) -> None:
        """We said that we are behind, and are not any more: nothing that comes may be there to tell our parent."""
        edge = self.parents.get(stripe)
        if edge is None or edge.behind < BEHIND_BYTES:
            return
        behind = self._behind(stripe)
        if behind < BEHIND_BYTES // 2:
            edge.behind = behind
            self._outbox.send(edge.peer, Credit(stripe, edge.allowed, behind))

    def _behind(self, stripe: int) -> int:
        """What waits for a child of this stripe, on average. Not at most: of a thousand nodes some are always late, and
        the others need not be."""
        children = self.children.get(stripe, {}).values()
        waiting = [child.backlog for child in children if not child.lagging and not child.late_joiner]
        return sum(waiting) // len(waiting) if waiting else 0

    # ------------------------------------------------------------ as a parent

    def attached(self, peer: bytes, message: Attach, now: float) -> None:
        """A child hangs on us: queue what it lacks of what we hold, and push from now on."""
        after = VersionId(message.epoch, message.version)
        if not any(peer in edges for edges in self.children.values()):
            self._outbox.emit(Ready(peer))
        edge = ChildEdge(peer, after, message.credit, moved_at=now)
        old = self.children.setdefault(message.stripe, {}).get(peer)
        if old is not None:  # what is under way to it still is, however often it attaches
            edge.flying, edge.flying_bytes = old.flying, old.flying_bytes
            self._unpay(peer, old.waiting)
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
                if chunk.key not in has and not self._lead(peer, message.stripe, edge, chunk, now):
                    continue
                for index in chunk.held():
                    if not given >> index & 1:
                        self._enqueue(edge, chunk, index, now)
        self._go_on(peer, message.stripe, edge, now)

    def _is_late_joiner(self, stripe: int, peer: bytes) -> bool:
        return (self._late_joiners is not None and self._late_joiners.has(peer)) or not self._entitled(stripe, peer)

    def _review(self) -> None:
        """Say anew who is a guest: a version has begun, the plan has changed, or somebody has gone or come back."""
        self._late_joiner_edges.clear()
        for stripe, edges in self.children.items():
            for peer, edge in edges.items():
                edge.late_joiner = self._is_late_joiner(stripe, peer)
                if edge.late_joiner:
                    self._late_joiner_edges[stripe, peer] = edge

    def review(self, now: float) -> None:
        """The plan has changed, or somebody has gone or come back: who is no guest any more need not wait."""
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
                self._unpay(peer, edge.waiting)
                self._tell_behind(k)

    def credited(self, peer: bytes, message: Credit, now: float) -> None:
        """A child allows more. A total that shrinks is ignored: credit once given stands."""
        edge = self.children.get(message.stripe, {}).get(peer)
        if edge is not None:
            edge.behind = message.behind
        if edge is not None and message.total > edge.allowed:
            edge.allowed = message.total
            if edge.flying_bytes == 0:
                edge.moved_at = now
            self._go_on(peer, message.stripe, edge, now)

    def push(self, chunk: Chunk, index: int, source: bytes | None, now: float) -> None:
        """We hold this header (index -1) or piece now: on to every child of its stripe but the one it came from."""
        if chunk.stripe is None:
            return
        if index == HEADER and chunk.sizes:
            self._pieces_of(chunk.sizes[0])
        id_ = VersionId(chunk.key.epoch, chunk.key.version)
        if index == HEADER and self._late_joiners is not None and self._late_joiners.opened(id_, now):
            self._review()
        for peer, edge in self.children.get(chunk.stripe, {}).items():
            if peer == source or id_ <= edge.after or chunk.key in edge.skipped or chunk.key in edge.unpaid:
                continue
            if index == HEADER:
                self._lead(peer, chunk.stripe, edge, chunk, now)
            elif self._enqueue(edge, chunk, index, now) and not edge.late_joiner:
                self._pump(peer, chunk.stripe, edge, now)
        if index != HEADER:
            self.serve_late_joiners(now)

    def _pieces_of(self, size: int) -> None:
        """This is how large pieces are now. Credit that was left for smaller ones may not do for a single one, which
        would then wait for what comes after it."""
        larger, self._piece_bytes = size > self._piece_bytes, size
        for stripe in self.parents if larger else ():
            self.give_credit(stripe)

    def sent(self, peer: bytes, stripe: int, key: ChunkKey, index: int, now: float) -> None:
        """The socket to a child took this: it no longer counts as backlog."""
        edge = self.children.get(stripe, {}).get(peer)
        size = edge.flying.pop((key, index), None) if edge is not None else None
        if edge is None or size is None:
            return
        edge.flying_bytes -= size
        if index != HEADER:  # headers go whether it takes anything or not
            edge.pace_s += 0.1 * (now - edge.moved_at - edge.pace_s)
            edge.moved_at = now
            edge.lagging = False
        self._go_on(peer, stripe, edge, now)
        self._tell_behind(stripe)

    def gave(self, peer: bytes, chunk: Chunk, pieces: Iterable[int], now: float) -> None:
        """We answer a pull of `peer`. A child counts these bytes as the stripe's, so we do too."""
        size = chunk.header_bytes + sum(chunk.sizes[index] for index in pieces)
        self._uplink.take(size, now)
        edge = self.children.get(chunk.stripe, {}).get(peer) if chunk.stripe is not None else None
        if edge is not None:
            edge.sent += size

    def paid(self, peer: bytes, chunk: Chunk, pieces: Iterable[int]) -> list[int]:
        """Of these pieces, which `peer` asks for, those that may be given, with the header."""
        if self._egress_budget is None:
            return list(pieces) if self._gives else []
        if not self._egress_budget.take(chunk.key, HEADER, chunk.header_bytes, peer):
            return []
        paid = [index for index in pieces if self._egress_budget.take(chunk.key, index, chunk.sizes[index], peer)]
        if not paid:
            self._egress_budget.back(chunk.key, HEADER, chunk.header_bytes, peer)
        return paid

    def spare(self, stripe: int, peer: bytes) -> int:
        """Bytes that this child would take at once; negative when it is not attached."""
        edge = self.children.get(stripe, {}).get(peer)
        return -1 if edge is None else edge.spare

    @property
    def gives(self) -> bool:
        """Whether this machine has uplink to give today; what waits meanwhile goes on waiting."""
        return self._gives

    def give(self, gives: bool, now: float) -> None:
        """From now on there is uplink to give, or none."""
        self._gives = gives
        for stripe, edges in self.children.items():
            for peer, edge in edges.items():
                if not edge.late_joiner:
                    self._pump(peer, stripe, edge, now)
        self.serve_late_joiners(now)

    def tick(self, now: float) -> None:
        """Find children that lag."""
        for stripe, edges in self.children.items():
            for edge in edges.values():
                limit_s = min(self._tuning.lag_after_s, max(LAG_LEAST_S, LAG_TIMES * edge.pace_s))
                stuck = edge.backlog > 0 and now - edge.moved_at > limit_s
                if stuck and not edge.lagging:
                    edge.lagging = True
                    self._tell_behind(stripe)
        self.serve_late_joiners(now)

    def skip(self, peer: bytes, stripe: int, key: ChunkKey) -> None:
        """A child gets this chunk elsewhere: what has not been handed over need not be."""
        edge = self.children.get(stripe, {}).get(peer)
        if edge is None or self._chunks.find(key) is None:  # else names that a child makes up would fill our memory
            return
        edge.skipped.add(key)
        dropped = [item for item in edge.waiting if item[0].key == key and item[1] != HEADER]
        edge.waiting = deque(item for item in edge.waiting if item not in dropped)
        edge.waiting_bytes -= sum(size for _, _, size in dropped)
        self._unpay(peer, dropped)

    def take_back(self, peer: bytes, chunk: Chunk, pieces: int, now: float) -> bool:
        """If it was skipped: the child did not get these pieces elsewhere after all, so they go in their turn."""
        edge = self.children.get(chunk.stripe, {}).get(peer) if chunk.stripe is not None else None
        if edge is None or chunk.stripe is None or chunk.key not in edge.skipped:
            return False
        edge.skipped.discard(chunk.key)
        for index in chunk.held():
            if pieces >> index & 1:
                self._enqueue(edge, chunk, index, now)
        self._go_on(peer, chunk.stripe, edge, now)
        return True

    @property
    def waiting_bytes(self) -> int:
        """What waits for children's credit, or to be handed over; guests left out."""
        edges = (edge for edges in self.children.values() for edge in edges.values())
        return sum(edge.waiting_bytes for edge in edges if not edge.late_joiner)

    def has_time(self, now: float) -> bool:
        """Whether guests may be given something: little waits for the others, and the uplink has little to send, so
        that whatever comes for the others leaves soon."""
        little = self._little_bytes
        edges = (edge for edges in self.children.values() for edge in edges.values())
        waiting = sum(edge.waiting_bytes for edge in edges if not edge.late_joiner and not edge.lagging)
        return waiting < little and self._uplink.queued_bytes(now) < little

    @property
    def _little_bytes(self) -> float:
        return max(1.0, self._tuning.idle_s * self._uplink.bytes_s())

    def forget(self, id_: VersionId) -> None:
        """A version was dropped: nothing of it needs sending any more."""
        for key in [key for key in self._copies if (key.epoch, key.version) == id_]:
            del self._copies[key]
        for edges in self.children.values():
            for edge in edges.values():
                edge.skipped = {key for key in edge.skipped if (key.epoch, key.version) != id_}
                edge.unpaid = {key for key in edge.unpaid if (key.epoch, key.version) != id_}
                kept = deque(item for item in edge.waiting if (item[0].key.epoch, item[0].key.version) != id_)
                edge.waiting = kept
                edge.waiting_bytes = sum(size for _, _, size in kept)

    def _enqueue(self, edge: ChildEdge, chunk: Chunk, index: int, now: float) -> bool:
        """False when there is no egress left for it; without its header no piece of a chunk may go."""
        size = _size(chunk, index)
        if self._egress_budget is not None and not self._egress_budget.take(chunk.key, index, size, edge.peer):
            if index == HEADER:
                edge.unpaid.add(chunk.key)
            return False
        if edge.backlog == 0:
            edge.moved_at = now  # the clock of its lag starts here
        edge.waiting.append((chunk, index, size))
        edge.waiting_bytes += size
        return True

    def _lead(self, peer: bytes, stripe: int, edge: ChildEdge, chunk: Chunk, now: float) -> bool:
        """A chunk's header: at once, whatever else waits and whatever credit there is. A child that knows what is to
        come can get it elsewhere. False when there is no egress left for it."""
        if not self._enqueue(edge, chunk, HEADER, now):
            return False
        if self._gives and edge.flying_bytes < MAX_AHEAD_BYTES:
            _, _, size = edge.waiting.pop()
            edge.waiting_bytes -= size
            self._hand_over(peer, stripe, edge, chunk, HEADER, now)
        return True

    def _unpay(self, peer: bytes, waiting: Iterable[tuple[Chunk, int, int]]) -> None:
        """What waits does not leave."""
        if self._egress_budget is not None:
            for chunk, index, size in waiting:
                self._egress_budget.back(chunk.key, index, size, peer)

    def _pump(
        self,
        peer: bytes,
        stripe: int,
        edge: ChildEdge,
        now: float,
        most_queued: float = math.inf,
    ) -> None:
        """Hand over what waits, as far as credit reaches, while less than `most_queued` bytes wait at our uplink."""
        while self._gives and edge.waiting and edge.sent + edge.waiting[0][2] <= edge.allowed:
            if edge.flying_bytes >= MAX_AHEAD_BYTES or self._uplink.queued_bytes(now) >= most_queued:
                return
            if edge.waiting[0][0].key != edge.current:
                self._choose(edge)
            chunk, index, size = edge.waiting.popleft()
            edge.waiting_bytes -= size
            self._hand_over(peer, stripe, edge, chunk, index, now)

    def _go_on(self, peer: bytes, stripe: int, edge: ChildEdge, now: float) -> None:
        if not edge.late_joiner:
            self._pump(peer, stripe, edge, now)
        self.serve_late_joiners(now)

    def serve_late_joiners(self, now: float) -> None:
        """Those that were given least first. Whether there is time for them is found out once and not for each, or
        members that attach to everybody would have us do nothing else."""
        waiting = [
            (edge.sent, stripe, peer) for (stripe, peer), edge in self._late_joiner_edges.items() if edge.waiting
        ]
        if not waiting or not self.has_time(now):
            return
        for _, stripe, peer in sorted(waiting):
            self._pump(peer, stripe, self._late_joiner_edges[stripe, peer], now, self._little_bytes)

    def _choose(self, edge: ChildEdge) -> None:
        """Which chunk it gets next: of those that wait whole, the one that fewest children were given. Where we cannot
        keep up, each child then has what others lack, and they can help one another."""
        waiting = dict.fromkeys(chunk.key for chunk, _, _ in edge.waiting if chunk.whole)
        if len(waiting) > 1:
            first = min(waiting, key=lambda key: self._copies[key])
            if first != edge.waiting[0][0].key:
                ours = [item for item in edge.waiting if item[0].key == first]
                edge.waiting = deque([*ours, *(item for item in edge.waiting if item[0].key != first)])
        edge.current = edge.waiting[0][0].key
        self._copies[edge.current] += 1

    def _hand_over(self, peer: bytes, stripe: int, edge: ChildEdge, chunk: Chunk, index: int, now: float) -> None:
        """To the shell."""
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
