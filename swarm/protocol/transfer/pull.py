"""Pull what lags: chunks whose stripe stands still are asked of backups, at any time and not only at the end.

The trees are the fast way; this is the sure one. A chunk is asked of one source at a time; a source that says it lacks
it, or brings nothing for `pull_deadline_s`, makes way for the next. The authority is always the last in the list that
the caller gives.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.core.wire import WantChunk
from swarm.protocol.transfer.chunks import Chunk, Version, bits_of

__all__ = ["Pulls", "Sources", "Uploads"]

Sources = Callable[[int | None], list[bytes]]
"""Peers that may be asked for a chunk of this stripe (None: of an unknown one), best first."""


PASSED_BY = 32
"""Four rounds of eight stripes: a stripe is never dealt so far ahead of its siblings."""


@dataclass(slots=True)
class Pull:
    """One chunk being asked for."""

    tried: list[bytes] = field(default_factory=list)
    source: bytes | None = None
    asked_at: float = 0.0
    deadline: float = 0.0


class Pulls:
    """The chunks being pulled."""

    def __init__(self, tuning: Tuning, outbox: Outbox) -> None:
        self._tuning = tuning
        self._outbox = outbox
        self._pulls: dict[tuple[VersionId, int], Pull] = {}
        self._seen: dict[VersionId, deque[tuple[float, int]]] = {}
        """Of each version on its way, the newest chunk begun, at each tick of the last `pull_after_s`."""

    def tick(
        self,
        versions: Iterable[Version],
        progress_at: dict[int, float],
        sources: Sources,
        now: float,
        relieved: Callable[[Chunk], bool] = lambda chunk: False,
        passed_after_s: float | None = None,
    ) -> None:
        """Start a pull for what has stood still too long; move pulls whose deadline passed to their next source.

        `versions`: those on their way in, oldest first. `relieved`: whether a chunk is got from a neighbour already.
        `passed_after_s`: how long others must have been past a chunk of which we have not even a header (None:
        `pull_after_s`).
        """
        wait_s = self._tuning.pull_after_s if passed_after_s is None else passed_after_s
        wanted: set[tuple[VersionId, int]] = set()
        last = max(progress_at.values(), default=0.0)
        versions = list(versions)
        self._seen = {id_: seen for id_, seen in self._seen.items() if any(v.id == id_ for v in versions)}
        for i, version in enumerate(versions):
            overtaken = any(later.chunks for later in versions[i + 1 :])
            passed = self._passed(version, now, wait_s)
            for seq in version.missing():
                if len(wanted) >= self._tuning.pulls_in_flight:
                    break
                chunk = version.chunks.get(seq)
                if chunk is not None and relieved(chunk):
                    continue
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
                    self._ask(version, seq, pull, sources(stripe), now)
        for name in [n for n in self._pulls if n not in wanted]:
            del self._pulls[name]

    def _passed(self, version: Version, now: float, wait_s: float) -> int:
        """Chunks before this one are later than their siblings: `wait_s` ago the other stripes had got past them.

        The authority deals in order, so what lies `PASSED_BY` behind the newest was dealt long before it.
        """
        seen = self._seen.setdefault(version.id, deque())
        seen.append((now, max(version.chunks, default=0)))
        while len(seen) > 1 and now - seen[1][0] >= wait_s:
            seen.popleft()
        since, newest = seen[0]
        return newest - PASSED_BY if now - since >= wait_s else 0

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

    def lacks(self, peer: bytes, key: ChunkKey) -> None:
        """`peer` says it has none of it: the next source's turn, at the next tick."""
        pull = self._pulls.get((VersionId(key.epoch, key.version), key.seq))
        if pull is not None and pull.source == peer:
            pull.deadline = 0.0

    def asked_of(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether we asked this peer for this chunk."""
        pull = self._pulls.get((VersionId(key.epoch, key.version), key.seq))
        return pull is not None and peer in pull.tried

    def asked(self) -> dict[bytes, float]:
        """Whom something is asked of now, and since when at the latest."""
        return {pull.source: pull.asked_at for pull in self._pulls.values() if pull.source is not None}

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone, and with it what it was to send; or it does not answer."""
        for pull in self._pulls.values():
            if pull.source == peer:
                pull.deadline = 0.0

    def _ask(
        self,
        version: Version,
        seq: int,
        pull: Pull,
        sources: list[bytes],
        now: float,
    ) -> None:
        fresh = [p for p in sources if p not in pull.tried]
        if not fresh:  # everybody was asked once: what they lacked then, they may have after a pause
            pull.tried.clear()
            pull.source = None
            pull.deadline = now + self._tuning.pull_after_s
            return
        pull.deadline = now + self._tuning.pull_deadline_s
        pull.source, pull.asked_at = fresh[0], now
        pull.tried.append(fresh[0])
        self._outbox.send(fresh[0], _want(version, seq))


def _want(version: Version, seq: int) -> WantChunk:
    """Ask for what we lack of a chunk."""
    chunk = version.chunks.get(seq)
    pieces = bits_of(chunk.full & ~chunk.have, chunk.full) if chunk is not None else b""
    return WantChunk(version.id.epoch, version.id.version, version.attempt, seq, pieces)


class Uploads:
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
        uploads = self._left.get(peer, {})
        if key in uploads:
            uploads[key] -= 1
            if not uploads[key]:
                del uploads[key]

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone."""
        self._left.pop(peer, None)
