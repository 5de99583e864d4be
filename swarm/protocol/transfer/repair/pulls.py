"""Pulls: chunks of a stripe that makes no progress are requested from other peers, at any time and not only at the end.

The trees are the fast path; pulls are the reliable one. A chunk is requested from one source at a time. If the source
says that it lacks the chunk, or sends nothing for `pull_deadline_s`, the next one is asked. The caller lists the
authority last.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from codec import ChunkKey
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.version import VersionId
from swarm.protocol.transfer.chunks import Chunk, Version

__all__ = ["Pulls", "Sources"]

Sources = Callable[[int | None], list[bytes]]
"""Maps a stripe (None: unknown) to the peers that may be asked for its chunks, best first."""


PASSED_BY = 32
"""Chunks: four rounds of eight stripes. The authority never assigns one stripe so far ahead of the others."""


@dataclass(slots=True)
class Pull:
    """The pull of one chunk. `tried`: sources asked so far; `source`: the current one. Local times."""

    tried: list[bytes] = field(default_factory=list)
    source: bytes | None = None
    asked_at: float = 0.0
    deadline: float = 0.0


class Pulls:
    """The pulls of one member, by version and sequence number."""

    def __init__(self, tuning: Tuning, outbox: Outbox, *, header_first: bool = False) -> None:
        """`header_first`: ask for a header before the pieces, since they may not be needed."""
        self._header_first = header_first
        self._tuning = tuning
        self._outbox = outbox
        self._pulls: dict[tuple[VersionId, int], Pull] = {}
        self._seen: dict[VersionId, deque[tuple[float, int]]] = {}
        """By version in flight: (time, newest chunk begun) at each tick of the last `pull_after_s`."""

    def tick(
        self,
        versions: Iterable[Version],
        progress_at: dict[int, float],
        sources: Sources,
        now: float,
        promised: Container[ChunkKey] = (),
        passed_after_s: float | None = None,
    ) -> None:
        """Start pulls for chunks of stripes without progress, and ask the next source where a deadline has passed.

        `versions`: the incomplete versions, oldest first. `progress_at`: local time of each stripe's last progress.
        `promised`: the chunks that load shedding already fetches from a neighbour. `passed_after_s`: how long the other
        stripes must have passed a chunk whose header has not come, before it is pulled (None: `pull_after_s`).
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
                if chunk is not None and chunk.key in promised:
                    continue
                stripe = chunk.stripe if chunk is not None else None
                moved = progress_at.get(stripe, version.progress_at) if stripe is not None else last
                if chunk is None and seq < passed:
                    moved = float("-inf")
                elif overtaken:  # trees keep the order, so what a later version has overtaken is lost
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
        """The sequence number below which a missing header is overdue: `wait_s` ago other stripes were past it.

        The authority assigns chunks in order, so a chunk `PASSED_BY` before the newest was assigned long before it.
        """
        seen = self._seen.setdefault(version.id, deque())
        seen.append((now, max(version.chunks, default=0)))
        while len(seen) > 1 and now - seen[1][0] >= wait_s:
            seen.popleft()
        since, newest = seen[0]
        return newest - PASSED_BY if now - since >= wait_s else 0

    def arrived(self, chunk: Chunk, now: float) -> None:
        """A piece of the chunk arrived, so its source is alive."""
        pull = self._pull_of(chunk.key)
        if pull is None:
            return
        if chunk.whole:
            del self._pulls[VersionId(chunk.key.epoch, chunk.key.version), chunk.key.seq]
        else:
            pull.deadline = now + self._tuning.pull_deadline_s

    def lacks(self, peer: bytes, key: ChunkKey) -> None:
        """`peer` does not have the chunk: ask the next source at the next tick."""
        pull = self._pull_of(key)
        if pull is not None and pull.source == peer:
            pull.deadline = 0.0

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether the chunk is being pulled."""
        return self._pull_of(key) is not None

    def asked_of(self, peer: bytes, key: ChunkKey) -> bool:
        """Whether this pull has asked `peer` for the chunk."""
        pull = self._pull_of(key)
        return pull is not None and peer in pull.tried

    def asked(self) -> dict[bytes, float]:
        """The current sources, and the time of the latest request to each."""
        return {pull.source: pull.asked_at for pull in self._pulls.values() if pull.source is not None}

    def lost(self, peer: bytes) -> None:
        """The session with `peer` is gone, or it does not answer: ask the next source at the next tick."""
        for pull in self._pulls.values():
            if pull.source == peer:
                pull.deadline = 0.0

    def _pull_of(self, key: ChunkKey) -> Pull | None:
        return self._pulls.get((VersionId(key.epoch, key.version), key.seq))

    def _ask(self, version: Version, seq: int, pull: Pull, sources: list[bytes], now: float) -> None:
        fresh = [p for p in sources if p not in pull.tried]
        if not fresh:  # all sources were asked once: after a pause they may have it
            pull.tried.clear()
            pull.source = None
            pull.deadline = now + self._tuning.pull_after_s
            return
        pull.deadline = now + self._tuning.pull_deadline_s
        pull.source, pull.asked_at = fresh[0], now
        pull.tried.append(fresh[0])
        self._outbox.send(fresh[0], version.want(seq, header_first=self._header_first))
