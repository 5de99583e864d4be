"""Relief: what a parent owes us and others could give sooner.

Headers run ahead of pieces, down all trees, so a child knows within a round trip what each stripe is to bring: it holds
the header of every chunk that has been dealt. What of them is still missing is what its parent *owes*. A parent that
has less uplink than the plan thought, or itself waits for another, owes more and more; one that keeps up never owes
much more than the chunk that is on its way.

Chunks beyond that are asked of neighbours whose uplink has nothing better to do, the oldest first, one neighbour at a
time; who lacks it, or is busy, says so at once. A parent that cannot keep up gives each child other chunks first (see
`exchange`), so that its children have what their siblings lack. Only when its first piece is here is the parent told to
skip the chunk, so that nothing is ever asked of nobody. What the giver then fails to bring is asked of the parent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.chunks import Chunk, bits_of
from swarm.protocol.events import Effect, Send, SetTimer, VersionId
from swarm.protocol.tuning import Tuning
from swarm.protocol.wire import Skip, WantChunk

__all__ = ["Relief"]

TRIES = 4
"""Neighbours asked for a chunk in a row; then it has to wait a little."""


@dataclass(slots=True)
class _Asked:
    """One chunk that we try to get from somebody else."""

    stripe: int
    tried: set[bytes] = field(default_factory=set)
    source: bytes | None = None
    deadline: float = 0.0
    begun: bool = False
    """Pieces of it come; the parent was told to skip it."""


class Relief:
    """Of one member. `sources(stripe)`: whom to ask for a chunk of it, best first; never the authority. `parent`: who
    brings a stripe."""

    def __init__(
        self,
        tuning: Tuning,
        sources: Callable[[int, int], list[bytes]],
        parent: Callable[[int], bytes | None],
    ) -> None:
        self._tuning = tuning
        self._sources = sources
        self._parent = parent
        self._owed: dict[int, dict[ChunkKey, tuple[Chunk, float]]] = {}
        """By stripe, in the order of their headers: chunks that are not whole yet, and from when on they are late."""
        self._due_at = float("inf")
        """When the timer goes off."""
        self._asked: dict[ChunkKey, _Asked] = {}
        self._busy: dict[bytes, float] = {}
        """Who lacked something or had no uplink to spare, and until when it is not asked again."""

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._asked

    def owes(self, chunk: Chunk, now: float, effects: list[Effect]) -> None:
        """Its header has come."""
        if chunk.stripe is not None:
            late = now + self._tuning.relief_after_s
            self._owed.setdefault(chunk.stripe, {})[chunk.key] = chunk, late
            self._wake(late, effects)

    def _wake(self, at: float, effects: list[Effect]) -> None:
        if at < self._due_at:
            self._due_at = at
            effects.append(SetTimer("relief", at))

    def arrived(self, chunk: Chunk, peer: bytes | None, now: float, effects: list[Effect]) -> None:
        """A piece of it came."""
        asked = self._asked.get(chunk.key)
        if asked is None:
            return
        if chunk.whole:
            del self._asked[chunk.key]
        elif peer == asked.source:
            asked.deadline = now + self._tuning.relief_deadline_s
            self._skip(chunk.key, asked, effects)

    def _skip(self, key: ChunkKey, asked: _Asked, effects: list[Effect]) -> None:
        parent = self._parent(asked.stripe)
        if not asked.begun and parent is not None:
            asked.begun = True
            effects.append(Send(parent, Skip(asked.stripe, *key)))

    def lacks(self, peer: bytes, key: ChunkKey, now: float, effects: list[Effect]) -> None:
        """`peer` says that it has not got it, or better things to do."""
        self._busy[peer] = now + self._tuning.relief_pause_s
        asked = self._asked.get(key)
        if asked is not None and asked.source == peer:
            self._next(key, asked, now, effects)

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone, and with it what it was to send."""
        for asked in self._asked.values():
            if asked.source == peer:
                asked.deadline = 0.0

    def due(self, now: float, effects: list[Effect]) -> None:
        """Some chunk is late: move on from who has brought nothing in time, and look at what is owed."""
        self._due_at = float("inf")
        self._busy = {peer: until for peer, until in self._busy.items() if until > now}
        for key, asked in list(self._asked.items()):
            if now >= asked.deadline:
                self._next(key, asked, now, effects)
        for stripe in list(self._owed):
            self._look(stripe, now, effects)
        nexts = [
            max(late, now + self._tuning.relief_pause_s)
            for chunks in self._owed.values()
            for _, late in chunks.values()
        ]
        if nexts:
            self._wake(min(nexts), effects)

    def forget(self, floor: VersionId) -> None:
        """Versions up to this one are settled."""
        for chunks in self._owed.values():
            for key in [k for k in chunks if (k.epoch, k.version) <= floor]:
                del chunks[key]
        for key in [k for k in self._asked if (k.epoch, k.version) <= floor]:
            del self._asked[key]

    def _look(self, stripe: int, now: float, effects: list[Effect]) -> None:
        """Ask for what is owed beyond what a parent in time would owe."""
        chunks = self._owed[stripe]
        parent = self._parent(stripe)
        if parent is None:
            return
        for key in [key for key, (chunk, _) in chunks.items() if chunk.whole]:
            del chunks[key]
        left = {key: (chunk.full & ~chunk.have).bit_count() * chunk.sizes[0]
                for key, (chunk, _) in chunks.items() if key not in self._asked}  # fmt: skip
        owed = sum(left.values())
        for key in left:
            chunk, late = chunks[key]
            asks = len(self._asked) < self._tuning.pulls_in_flight
            if asks and now >= late and not chunk.have and owed - left[key] >= self._tuning.owed_bytes:
                asked = self._asked[key] = _Asked(stripe)
                if not self._next(key, asked, now, effects):
                    return
                owed -= left[key]

    def _next(self, key: ChunkKey, asked: _Asked, now: float, effects: list[Effect]) -> bool:
        """Ask somebody else; False when there is nobody: then it is the parent's again."""
        owed = self._owed.get(asked.stripe, {}).get(key)
        parent = self._parent(asked.stripe)
        if owed is None:
            del self._asked[key]
            return False
        chunk, _ = owed
        for peer in self._sources(asked.stripe, key.seq) if len(asked.tried) < TRIES else ():
            if peer not in asked.tried and peer not in self._busy and peer != parent:
                asked.tried.add(peer)
                asked.source, asked.deadline = peer, now + self._tuning.relief_deadline_s
                effects.append(Send(peer, _want(chunk, idle=True)))
                return True
        del self._asked[key]
        if asked.begun and parent is not None:
            effects.append(Send(parent, _want(chunk, idle=False)))
        return False


def _want(chunk: Chunk, *, idle: bool) -> WantChunk:
    return WantChunk(*chunk.key, bits_of(chunk.full & ~chunk.have, chunk.full), idle)
