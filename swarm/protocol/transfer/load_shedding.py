"""Relief: what a parent owes us and others could give sooner.

Headers run ahead of pieces, down all trees, so a child knows within a round trip what each stripe is to bring: it holds
the header of every chunk that has been dealt. What of them is still missing is what its parent *owes*. A parent that
has less uplink than the plan thought, or itself waits for another, owes more and more; one that keeps up never owes
much more than what is on its way.

Chunks beyond that are *wished for*: a member tells its neighbours which, whenever the list changes, and who holds one
of them whole and has uplink to spare offers it (see `offers`). The newest come first, for the parent goes on with the
oldest meanwhile, and what it has handed to its socket comes twice. The first offer is taken, and the parent is told to
skip the chunk; so one who has nothing to give is asked nothing and answers nothing. A parent that cannot keep up gives
each child other chunks first (see `exchange`), so that its children have what their siblings lack. What a giver then
fails to bring is asked of the parent.

Once all of a version has been dealt, uplinks run out of work one after another, and all wait for the slowest. Then
whatever a parent has not begun is late at once, and neighbours hear of it sooner.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from codec import ChunkKey
from swarm.protocol.core.events import SetTimer
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import MAX_LATE_WANTS, LateChunkWants, Skip, WantChunk
from swarm.protocol.transfer.chunks import Chunk, bits_of

__all__ = ["LATE_WANTS_HOLD_S", "PROMISES", "LoadShedding", "Parents"]

LATE_WANTS_HOLD_S = 1.0
"""A list of wishes is good for so long; it is said again before that."""
PROMISES = 2
"""That one neighbour is believed at a time."""
BROKEN_S = 10.0
"""Who did not bring what it offered is not believed again for so long."""


@dataclass(slots=True)
class _Promised:
    """One chunk that somebody else brings."""

    stripe: int
    source: bytes
    deadline: float


class Parents(Protocol):
    """Of an `Exchange`: the parents of a member."""

    def parent(self, stripe: int) -> bytes | None:
        """The peer that sends this stripe to us."""
        ...

    def note_owed(self, stripe: int, size: int) -> None:
        """Our parent in this stripe owes us `size` bytes, beside what other neighbours promised."""
        ...


class LoadShedding:
    """Of one member."""

    def __init__(
        self,
        tuning: Tuning,
        outbox: Outbox,
        parents: Parents,
        *,
        neighbours: Callable[[], list[bytes]],
        assigned: Callable[[ChunkKey], bool],
    ) -> None:
        """`neighbours()`: peers to tell, never the authority. `assigned`: whether the headers of all chunks of this
        chunk's version are here."""
        self._tuning = tuning
        self._outbox = outbox
        self._neighbours = neighbours
        self._parents = parents
        self._parent = parents.parent
        self._assigned = assigned
        self._owed: dict[int, dict[ChunkKey, tuple[Chunk, float]]] = {}
        """By stripe, in the order of their headers: chunks that are not whole yet, and from when on they are late."""
        self._due_at = float("inf")
        """When the timer goes off."""
        self._promised: dict[ChunkKey, _Promised] = {}
        self._wants: list[ChunkKey] = []
        self._told: dict[bytes, list[ChunkKey]] = {}
        """What each neighbour was told."""
        self._told_at = float("-inf")
        self._broke: dict[bytes, float] = {}
        """Who did not bring what it offered, and until when it is not believed."""

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._promised

    def owes(self, chunk: Chunk, now: float) -> None:
        """Its header has come."""
        if chunk.stripe is not None:
            late = now + (
                self._tuning.load_shedding_end_s if self._assigned(chunk.key) else self._tuning.load_shedding_after_s
            )
            self._owed.setdefault(chunk.stripe, {})[chunk.key] = chunk, late
            self._wake(late)

    def _wake(self, at: float) -> None:
        if at < self._due_at:
            self._due_at = at
            self._outbox.emit(SetTimer("relief", at))

    def arrived(self, chunk: Chunk, peer: bytes | None, now: float) -> None:
        """A piece of it came."""
        promised = self._promised.get(chunk.key)
        if promised is None:
            return
        if chunk.whole:
            del self._promised[chunk.key]
        elif peer == promised.source:
            promised.deadline = now + self._tuning.load_shedding_deadline_s

    def offered(self, peer: bytes, key: ChunkKey, now: float) -> None:
        """`peer` holds it and has uplink to spare. Taken if it is late still: what the parent has come to meanwhile may
        be on its way, and would come twice. Who offers what we need no more is told what we do need."""
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
        self._outbox.send(peer, _want(chunk))

    def _believes(self, peer: bytes, key: ChunkKey, now: float) -> bool:
        by = Counter(promised.source for promised in self._promised.values())
        room = by.total() < self._tuning.pulls_in_flight and by[peer] < PROMISES
        return room and key not in self._promised and now >= self._broke.get(peer, now)

    def asked_of(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether we took this peer's offer of this chunk, and wait for it."""
        promised = self._promised.get(key)
        return promised is not None and promised.source == peer

    def lacks(self, peer: bytes, key: ChunkKey) -> None:
        """`peer` cannot give it after all."""
        promised = self._promised.get(key)
        if promised is not None and promised.source == peer:
            self._back_to_parent(key, promised)

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone, and with it what it was to send."""
        self._told.pop(peer, None)
        self._broke.pop(peer, None)
        for promised in self._promised.values():
            if promised.source == peer:
                promised.deadline = 0.0

    def due(self, now: float) -> None:
        """Some chunk is late: go back to the parent with what was promised and did not come, look at what is owed."""
        self._due_at = float("inf")
        for key, promised in list(self._promised.items()):
            if now >= promised.deadline:
                self._broke[promised.source] = now + BROKEN_S
                self._back_to_parent(key, promised)
        wants = sorted(key for stripe in self._owed for key in self._late(stripe, now))
        self._wants = [key for key in wants[:MAX_LATE_WANTS] if key[:3] == wants[0][:3]][::-1]
        if now - self._told_at >= 0.6 * LATE_WANTS_HOLD_S:  # whoever has a list is told it again
            self._told = {peer: keys for peer, keys in self._told.items() if not keys}
            self._told_at = now
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
            if self._told.get(peer, []) != wants:
                self._told[peer] = wants
                turn = i * len(wants) // max(1, len(peers))
                of = wants[0][:3] if wants else (0, 0, 0)
                seqs = tuple(key.seq for key in wants[turn:] + wants[:turn])
                self._outbox.send(peer, LateChunkWants(*of, seqs))

    def forget(self, floor: VersionId) -> None:
        """Versions up to this one are settled."""
        for chunks in self._owed.values():
            for key in [k for k in chunks if (k.epoch, k.version) <= floor]:
                del chunks[key]
        for key in [k for k in self._promised if (k.epoch, k.version) <= floor]:
            del self._promised[key]

    def _late(self, stripe: int, now: float) -> list[ChunkKey]:
        """What is owed in this stripe beyond what a parent in time would owe, and nothing of has come: the newest."""
        chunks = self._owed[stripe]
        for key in [key for key, (chunk, _) in chunks.items() if chunk.whole]:
            del chunks[key]
        if self._parent(stripe) is None:
            self._parents.note_owed(stripe, 0)
            return []
        left = {key: (chunk.full & ~chunk.have).bit_count() * chunk.sizes[0]
                for key, (chunk, _) in chunks.items() if key not in self._promised}  # fmt: skip
        owed = sum(left.values())
        self._parents.note_owed(stripe, owed)
        late: list[ChunkKey] = []
        for key in reversed(left):
            chunk, at = chunks[key]
            assigned = self._assigned(key)
            in_time = chunk.sizes[0]
            if not assigned:
                in_time += chunk.sizes[0] + int(self._tuning.owed_s * self._tuning.stripe_bytes_s)
            if (assigned or now >= at) and not chunk.have and owed - left[key] >= in_time:
                late.append(key)
                owed -= left[key]
        return late

    def _back_to_parent(self, key: ChunkKey, promised: _Promised) -> None:
        del self._promised[key]
        owed = self._owed.get(promised.stripe, {}).get(key)
        parent = self._parent(promised.stripe)
        if owed is not None and parent is not None:
            self._outbox.send(parent, _want(owed[0]))


def _want(chunk: Chunk) -> WantChunk:
    return WantChunk(*chunk.key, bits_of(chunk.full & ~chunk.have, chunk.full))
