"""Pull what lags: chunks whose stripe stands still are asked of backups, at any time and not only at the end.

The trees are the fast way; this is the sure one. A chunk is asked of one source at a time; a source that says it lacks
it, or brings nothing for `pull_deadline_s`, makes way for the next. The authority is always the last in the list that
the caller gives.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.chunks import Chunk, Chunks, Version, bits_of
from swarm.protocol.events import Effect, Send, VersionId
from swarm.protocol.tuning import Tuning
from swarm.protocol.wire import WantChunk

__all__ = ["Gifts", "Pulls", "Sources"]

Sources = Callable[[int | None], list[bytes]]
"""Peers that may be asked for a chunk of this stripe (None: of an unknown one), best first."""


PASSED_BY = 32
"""Four rounds of eight stripes: a stripe is never dealt so far ahead of its siblings."""
ASKED = 6
"""Sources asked in a round for a chunk that was shed."""
ROUNDS = 1
"""And rounds after the first."""


@dataclass(slots=True)
class Pull:
    """One chunk being asked for."""

    tried: list[bytes] = field(default_factory=list)
    source: bytes | None = None
    deadline: float = 0.0
    parent: bytes | None = None
    """Who told us to get it elsewhere: asked when nobody with uplink to spare has it."""
    stripe: int | None = None
    """Of what was shed."""
    rounds: int = 0


class Pulls:
    """The chunks being pulled."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._pulls: dict[tuple[VersionId, int], Pull] = {}
        self._seen: dict[VersionId, deque[tuple[float, int]]] = {}
        """Of each version on its way, the newest chunk begun, at each tick of the last `pull_after_s`."""
        self._lacked: dict[tuple[bytes, int | None], float] = {}
        """Who lacked something of a stripe, or had no uplink to spare, and until when it is not asked for more."""

    def tick(
        self,
        versions: Iterable[Version],
        progress_at: dict[int, float],
        sources: Sources,
        now: float,
        effects: list[Effect],
    ) -> None:
        """Start a pull for what has stood still too long; move pulls whose deadline passed to their next source.

        `versions`: those on their way in, oldest first.
        """
        shed = {name for name, pull in self._pulls.items() if pull.parent is not None}
        wanted: set[tuple[VersionId, int]] = set()
        last = max(progress_at.values(), default=0.0)
        versions = list(versions)
        self._seen = {id_: seen for id_, seen in self._seen.items() if any(v.id == id_ for v in versions)}
        for i, version in enumerate(versions):
            overtaken = any(later.chunks for later in versions[i + 1 :])
            passed = self._passed(version, now)
            for seq in version.missing():
                if (version.id, seq) in shed:
                    continue
                if len(wanted) >= self._tuning.pulls_in_flight:
                    break
                chunk = version.chunks.get(seq)
                stripe = chunk.stripe if chunk is not None else None
                moved = progress_at.get(stripe, version.progress_at) if stripe is not None else last
                if chunk is None and seq < passed:
                    moved = float("-inf")
                elif overtaken:  # trees keep order: what a later version has overtaken is not on its way any more
                    moved = version.progress_at
                elif stripe is None:
                    moved = max(moved, version.progress_at)
                pull = self._pulls.get((version.id, seq))
                if pull is None and now - moved <= self._tuning.pull_after_s:
                    continue
                wanted.add((version.id, seq))
                pull = self._pulls.setdefault((version.id, seq), Pull())
                if now >= pull.deadline:
                    self._ask(version, seq, pull, sources(stripe), now, effects)
        for name in [n for n in self._pulls if n not in wanted and n not in shed]:
            del self._pulls[name]

    def _passed(self, version: Version, now: float) -> int:
        """Chunks before this one are later than their siblings: `pull_after_s` ago the other stripes had got past them.

        The authority deals in order, so what lies `PASSED_BY` behind the newest was dealt long before it.
        """
        seen = self._seen.setdefault(version.id, deque())
        seen.append((now, max(version.chunks, default=0)))
        while len(seen) > 1 and now - seen[1][0] >= self._tuning.pull_after_s:
            seen.popleft()
        since, newest = seen[0]
        return newest - PASSED_BY if now - since >= self._tuning.pull_after_s else 0

    # ------------------------------------------------------------ what a parent shed

    def shed(self, parent: bytes, stripe: int, version: Version, seq: int, now: float) -> bool:
        """`parent` would push this chunk late. In `shed_wait_s`, when others can be expected to have it, those with
        uplink to spare are asked (`due`). True when that is to be done."""
        chunk = version.chunks.get(seq)
        if (chunk is not None and chunk.whole) or (version.id, seq) in self._pulls:
            return False
        self._pulls[version.id, seq] = Pull(deadline=now + self._tuning.shed_wait_s, parent=parent, stripe=stripe)
        return True

    def due(self, chunks: Chunks, sources: Sources, now: float, effects: list[Effect]) -> bool:
        """Ask for what was shed and is due; whether there is anything left to ask for."""
        left = False
        self._lacked = {name: until for name, until in self._lacked.items() if until > now}
        for (id_, seq), pull in list(self._pulls.items()):
            if pull.parent is None:
                continue
            version = chunks.version(id_)
            if version is None:
                del self._pulls[id_, seq]
                continue
            if now >= pull.deadline:
                self._ask_idle(version, seq, pull, sources(pull.stripe), now, effects)
            left = left or (id_, seq) in self._pulls
        return left

    def _ask_idle(
        self, version: Version, seq: int, pull: Pull, sources: list[bytes], now: float, effects: list[Effect]
    ) -> None:
        """The next who may have it and nothing better to do; after two rounds the parent itself, which then pushes it
        in its turn."""
        assert pull.parent is not None
        fresh = [
            peer
            for peer in sources
            if peer not in pull.tried and peer != pull.parent and (peer, pull.stripe) not in self._lacked
        ]
        if fresh and len(pull.tried) < ASKED:
            pull.source, pull.deadline = fresh[0], now + self._tuning.pull_deadline_s
            pull.tried.append(fresh[0])
            effects.append(Send(fresh[0], _want(version, seq, idle=True)))
        elif pull.rounds < ROUNDS:
            pull.rounds += 1
            pull.tried.clear()
            pull.source, pull.deadline = None, now + self._tuning.shed_wait_s
        else:
            effects.append(Send(pull.parent, _want(version, seq)))
            del self._pulls[version.id, seq]

    def arrived(self, chunk: Chunk, now: float) -> None:
        """A piece of it came: its source is alive."""
        name = VersionId(chunk.key.epoch, chunk.key.version), chunk.key.seq
        pull = self._pulls.get(name)
        if pull is None:
            return
        if chunk.whole:
            del self._pulls[name]
        else:
            pull.deadline = now + self._tuning.pull_deadline_s

    def lacks(
        self, peer: bytes, key: ChunkKey, chunks: Chunks, sources: Sources, now: float, effects: list[Effect]
    ) -> None:
        """`peer` says it has none of it, or no uplink to spare: the next source's turn, at the next tick; of what was
        shed at once."""
        id_ = VersionId(key.epoch, key.version)
        pull, version = self._pulls.get((id_, key.seq)), chunks.at(key)
        if pull is None or pull.source != peer:
            return
        pull.deadline = 0.0
        if pull.parent is not None and version is not None:
            self._lacked[peer, pull.stripe] = now + self._tuning.shed_wait_s
            self._ask_idle(version, key.seq, pull, sources(pull.stripe), now, effects)

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone, and with it what it was to send."""
        for pull in self._pulls.values():
            if pull.source == peer:
                pull.deadline = 0.0
            if pull.parent == peer:
                pull.parent = None

    def _ask(
        self,
        version: Version,
        seq: int,
        pull: Pull,
        sources: list[bytes],
        now: float,
        effects: list[Effect],
    ) -> None:
        fresh = [p for p in sources if p not in pull.tried]
        if not fresh:  # everybody was asked once: what they lacked then, they may have after a pause
            pull.tried.clear()
            pull.source = None
            pull.deadline = now + self._tuning.pull_after_s
            return
        pull.deadline = now + self._tuning.pull_deadline_s
        pull.source = fresh[0]
        pull.tried.append(fresh[0])
        effects.append(Send(fresh[0], _want(version, seq)))


def _want(version: Version, seq: int, *, idle: bool = False) -> WantChunk:
    """Ask for what we lack of a chunk."""
    chunk = version.chunks.get(seq)
    pieces = bits_of(chunk.full & ~chunk.have, chunk.full) if chunk is not None else b""
    return WantChunk(version.id.epoch, version.id.version, version.attempt, seq, pieces, idle)


class Gifts:
    """The other end: chunks that we are giving to peers that pull them. Bounds what one peer may have us queue."""

    def __init__(self, tuning: Tuning) -> None:
        self._most = 2 * tuning.pulls_in_flight
        self._left: dict[bytes, dict[ChunkKey, int]] = {}

    def busy(self, peer: bytes, key: ChunkKey) -> bool:
        """This very chunk is on its way to `peer` already."""
        return key in self._left.get(peer, {})

    @property
    def count(self) -> int:
        """Chunks that are on their way to whoever asked."""
        return sum(map(len, self._left.values()))

    def full(self, peer: bytes) -> bool:
        """It has asked for as much as it may."""
        return len(self._left.get(peer, {})) >= self._most

    def begin(self, peer: bytes, key: ChunkKey, frames: int) -> None:
        self._left.setdefault(peer, {})[key] = frames

    def sent(self, peer: bytes, key: ChunkKey) -> None:
        """One frame of it has left."""
        gifts = self._left.get(peer, {})
        if key in gifts:
            gifts[key] -= 1
            if not gifts[key]:
                del gifts[key]

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone."""
        self._left.pop(peer, None)
