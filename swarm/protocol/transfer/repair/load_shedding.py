"""Load shedding: a member fetches from its neighbours what a slow parent still owes it.

Headers are sent ahead of pieces in all trees. So within a round trip a child holds the header of every chunk that has
been assigned, and knows what each stripe will bring. The missing pieces of these chunks are what the parent of the
stripe *owes*. A parent with less uplink than planned, or one that itself waits for its parent, owes more and more; a
parent that keeps up owes little more than what is in flight.

The chunks beyond that are the member's *late-chunk wants*. It tells its neighbours the list whenever it changes. A
neighbour that holds one of the chunks completely and has uplink to spare offers it (see `offers`); the others are not
asked, and do not answer. The newest chunks come first in the list, because the parent continues with the oldest, and
pieces that it has handed to its socket would arrive twice. The member takes the first offer, and tells the parent to
skip the chunk. A parent that cannot keep up starts with a different chunk for each child (see `exchange`), so that its
children can help one another. If the neighbour fails to bring the chunk, the member asks its parent for it again.

Once all chunks of a version are assigned, uplinks run out of work one after another, and all members wait for the
slowest. From then on every chunk that a parent has not begun is late at once, and neighbours hear of it sooner.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from codec import ChunkKey
from swarm.protocol.core.events import SetTimer
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import MAX_LATE_WANTS, LateChunkWants, Skip
from swarm.protocol.transfer.chunks import Chunk
from swarm.protocol.transfer.parents import Parents

__all__ = ["LATE_WANTS_HOLD_S", "PROMISES", "LoadShedding"]

LATE_WANTS_HOLD_S = 1.0
"""Seconds for which a list of wants is valid; it is repeated before that."""
PROMISES = 2
"""Offers taken from one neighbour at a time."""
BROKEN_S = 10.0
"""No offer is taken for this long from a neighbour that did not bring a chunk that it offered."""


@dataclass(slots=True)
class _Promised:
    """A chunk that a neighbour has offered and will bring."""

    stripe: int
    source: bytes
    deadline: float


class LoadShedding:
    """The load shedding of one member."""

    def __init__(
        self,
        tuning: Tuning,
        outbox: Outbox,
        parents: Parents,
        *,
        neighbours: Callable[[], list[bytes]],
        assigned: Callable[[ChunkKey], bool],
    ) -> None:
        """`neighbours()`: the peers to tell, never the authority. `assigned(chunk)`: whether the headers of all chunks
        of the chunk's version have arrived."""
        self._tuning = tuning
        self._outbox = outbox
        self._neighbours = neighbours
        self._parents = parents
        self._parent = parents.parent
        self._assigned = assigned
        self._owed: dict[int, dict[ChunkKey, tuple[Chunk, float]]] = {}
        """By stripe, in the order of their headers: incomplete chunks, and the local time from which each is late."""
        self._due_at = float("inf")
        """Local time for which the timer is set."""
        self._promised: dict[ChunkKey, _Promised] = {}
        self._wants: list[ChunkKey] = []
        self._sent: dict[bytes, list[ChunkKey]] = {}
        """The list that each neighbour was last sent."""
        self._sent_at = float("-inf")
        self._broke: dict[bytes, float] = {}
        """Neighbours that did not bring a chunk that they offered, and until when their offers are not taken."""

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._promised

    def owes(self, chunk: Chunk, now: float) -> None:
        """The chunk's header has arrived: the parent of its stripe owes it."""
        if chunk.stripe is not None:
            late = now + (
                self._tuning.load_shedding_end_s if self._assigned(chunk.key) else self._tuning.load_shedding_after_s
            )
            self._owed.setdefault(chunk.stripe, {})[chunk.key] = chunk, late
            self._wake(late)

    def _wake(self, at: float) -> None:
        if at < self._due_at:
            self._due_at = at
            self._outbox.emit(SetTimer("load-shedding", at))

    def arrived(self, chunk: Chunk, peer: bytes | None, now: float) -> None:
        """A piece of the chunk arrived."""
        promised = self._promised.get(chunk.key)
        if promised is None:
            return
        if chunk.whole:
            del self._promised[chunk.key]
        elif peer == promised.source:
            promised.deadline = now + self._tuning.load_shedding_deadline_s

    def offered(self, peer: bytes, key: ChunkKey, now: float) -> None:
        """`peer` offers a chunk. The offer is taken only if the chunk is still late.

        Otherwise the parent may have begun to send it meanwhile, and it would come twice. A peer whose offer is not
        taken is told the current wants.
        """
        chunk = next((chunks[key][0] for chunks in self._owed.values() if key in chunks), None)
        self._wants = [want for want in self._wants if want != key]
        if (
            chunk is None
            or chunk.stripe is None
            or chunk.have
            or not self._believes(peer, key, now)
            or (self._parent(chunk.stripe) is not None and key not in self._late(chunk.stripe, now))
        ):
            self._tell([peer])
            return
        self._promised[key] = _Promised(chunk.stripe, peer, now + self._tuning.load_shedding_deadline_s)
        parent = self._parent(chunk.stripe)
        if parent is not None and parent != peer:
            self._outbox.send(parent, Skip(chunk.stripe, *key))
        self._outbox.send(peer, chunk.want())

    def _believes(self, peer: bytes, key: ChunkKey, now: float) -> bool:
        by = Counter(promised.source for promised in self._promised.values())
        room = by.total() < self._tuning.pulls_in_flight and by[peer] < PROMISES
        return room and key not in self._promised and now >= self._broke.get(peer, now)

    def asked_of(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether we took the offer of this chunk from `peer`, and wait for it."""
        promised = self._promised.get(key)
        return promised is not None and promised.source == peer

    def lacks(self, peer: bytes, key: ChunkKey) -> None:
        """`peer` cannot give the chunk after all."""
        promised = self._promised.get(key)
        if promised is not None and promised.source == peer:
            self._ask_parent_again(key, promised)

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone: what it promised is overdue."""
        self._sent.pop(peer, None)
        self._broke.pop(peer, None)
        for promised in self._promised.values():
            if promised.source == peer:
                promised.deadline = 0.0

    def due(self, now: float) -> None:
        """The timer went off: ask parents for overdue promised chunks, and tell the neighbours the current wants."""
        self._due_at = float("inf")
        for key, promised in list(self._promised.items()):
            if now >= promised.deadline:
                self._broke[promised.source] = now + BROKEN_S
                self._ask_parent_again(key, promised)
        wants = sorted(key for stripe in self._owed for key in self._late(stripe, now))
        self._wants = [key for key in wants[:MAX_LATE_WANTS] if key[:3] == wants[0][:3]][::-1]
        if now - self._sent_at >= 0.6 * LATE_WANTS_HOLD_S:  # repeat the list to all that were told one
            self._sent = {peer: keys for peer, keys in self._sent.items() if not keys}
            self._sent_at = now
        self._tell(self._neighbours())
        nexts = [
            now + self._tuning.load_shedding_end_s
            if self._assigned(key)
            else max(late, now + self._tuning.load_shedding_pause_s)
            for chunks in self._owed.values()
            for key, (_, late) in chunks.items()
        ]
        if nexts:
            self._wake(min(nexts))

    def _tell(self, peers: list[bytes]) -> None:
        wants = self._wants
        for i, peer in enumerate(peers):
            if self._sent.get(peer, []) != wants:
                self._sent[peer] = wants
                turn = i * len(wants) // max(1, len(peers))
                of = wants[0][:3] if wants else (0, 0, 0)
                seqs = tuple(key.seq for key in wants[turn:] + wants[:turn])
                self._outbox.send(peer, LateChunkWants(*of, seqs))

    def forget(self, floor: VersionId) -> None:
        """Versions up to `floor` are applied: drop their chunks."""
        for chunks in self._owed.values():
            for key in [k for k in chunks if (k.epoch, k.version) <= floor]:
                del chunks[key]
        for key in [k for k in self._promised if (k.epoch, k.version) <= floor]:
            del self._promised[key]

    def _late(self, stripe: int, now: float) -> list[ChunkKey]:
        """The chunks of a stripe that are late, newest first; none of their pieces has come.

        A healthy parent may owe two pieces plus `owed_s` of stripe throughput; chunks beyond that are late. Once the
        version is fully assigned, it may owe one piece.
        """
        chunks = self._owed[stripe]
        for key in [key for key, (chunk, _) in chunks.items() if chunk.whole]:
            del chunks[key]
        if self._parent(stripe) is None:
            self._parents.note_owed(stripe, 0)
            return []
        missing_bytes = {key: (chunk.full & ~chunk.have).bit_count() * chunk.sizes[0]
                for key, (chunk, _) in chunks.items() if key not in self._promised}  # fmt: skip
        owed_bytes = sum(missing_bytes.values())
        self._parents.note_owed(stripe, owed_bytes)
        late: list[ChunkKey] = []
        for key in reversed(missing_bytes):
            chunk, at = chunks[key]
            assigned = self._assigned(key)
            tolerated_bytes = chunk.sizes[0]
            if not assigned:
                tolerated_bytes += chunk.sizes[0] + int(self._tuning.owed_s * self._tuning.stripe_bytes_s)
            if (assigned or now >= at) and not chunk.have and owed_bytes - missing_bytes[key] >= tolerated_bytes:
                late.append(key)
                owed_bytes -= missing_bytes[key]
        return late

    def _ask_parent_again(self, key: ChunkKey, promised: _Promised) -> None:
        del self._promised[key]
        owed = self._owed.get(promised.stripe, {}).get(key)
        parent = self._parent(promised.stripe)
        if owed is not None and parent is not None:
            self._outbox.send(parent, owed[0].want())
