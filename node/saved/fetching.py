"""Fetches the fragments of the newest saved state that the nodes have whole.

The plan is pure. Every source fetches one fragment at a time, several sources side by side, until there are as many
fragments as the state needs. A source whose segment has another digest is asked nothing more, and another fragment, or
the same one of another source, takes the place of that one. So it is with a source whose segment takes too long.
"""

import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import trio
from blake3 import blake3

from codec.errors import PeerError, UsageError
from node.saved.coding import fragment_name
from node.saved.conversation import Conversation
from node.saved.folder import ComingFragment
from node.saved.messages import Body, Fetch, HeldState
from node.saved.record import StateRecord, open_record
from node.saved.sources import NodeSource, Sources
from swarm.guard import Source, guarded
from swarm.runtime.threads import in_thread
from swarm.store.disk import TEMPORARY, Disk

__all__ = [
    "MIN_BYTES_S",
    "SEGMENT_S",
    "FetchPlan",
    "FetchedFragments",
    "FoundState",
    "TooFew",
    "fetch_fragments",
    "fetch_newest",
    "fetched_folder",
    "newest_whole",
    "prove",
]

SEGMENT_S: Final = 60.0
MIN_BYTES_S: Final = 250_000
"""A segment is here within `SEGMENT_S`, and a second more for each `MIN_BYTES_S`, or its source is given up."""
SLOW_S: Final = 30.0
"""A fragment of which no segment has come for so long is slow: another source fetches another one beside it."""
LOOK_S: Final = 2.0
"""Interval at which a source without a fragment looks whether others are slow."""


class TooFew(UsageError):
    """The sources said that they have enough fragments, and did not give them."""


class FoundState(NamedTuple):
    """The state to fetch. `sealed`: its signed record. `holders`: by fragment, the numbers of the sources that say they
    have it. `newest`: the newest record that any source has; it may be of a state that was never placed whole."""

    record: StateRecord
    sealed: bytes
    holders: dict[int, list[int]]
    newest: StateRecord


class FetchedFragments(NamedTuple):
    """The fragments of a state that are here, verified. `fragments`: their files by number. `said`: the nodes that said
    they have some, whether they gave them or not."""

    found: FoundState
    fragments: dict[int, Path]
    said: frozenset[bytes]


def newest_whole(said: Sequence[Iterable[HeldState]], swarm: bytes, above: int = -1) -> FoundState | None:
    """The newest state of which the sources together have enough fragments; None: there is none.

    `said`: of each source, what it holds. `above`: only states with a higher serial. A record that `swarm` has not
    signed is ignored.
    Since a state is only replaced once the next one is placed whole, an older one is right while a newer one lacks
    fragments.
    """
    records: dict[bytes, StateRecord] = {}
    holders: dict[bytes, dict[int, list[int]]] = {}
    for number, states in enumerate(said):
        for state in states:
            if state.record not in records:
                try:
                    records[state.record] = open_record(state.record, swarm)
                except PeerError:
                    continue
            for fragment in set(state.fragments):
                if fragment < records[state.record].total:
                    holders.setdefault(state.record, {}).setdefault(fragment, []).append(number)
    if not records:
        return None
    newest = max(records.values(), key=lambda record: record.serial)
    for sealed, record in sorted(records.items(), key=lambda item: item[1].serial, reverse=True):
        if record.serial > above and len(holders.get(sealed, ())) >= record.needed:
            return FoundState(record, sealed, holders[sealed], newest)
    return None


class FetchPlan:
    """Which source fetches which fragment. Pure.

    free --next--> coming --fetched--> done
                     '-----failed-----> free, for other sources
    """

    def __init__(
        self,
        needed: int,
        holders: dict[int, list[int]],
        begun: Mapping[int, int] | None = None,
        done: Iterable[int] = (),
    ) -> None:
        """`holders`: by fragment, the sources that may have it. `begun`: bytes of fragments that are here already.
        `done`: those that are here whole."""
        self._needed = needed
        here = begun or {}
        self._order = sorted(holders, key=lambda fragment: (-here.get(fragment, 0), fragment))
        self._holders = {fragment: set(sources) for fragment, sources in holders.items()}
        self._coming: dict[int, int] = {}
        self.done = set(done)

    @property
    def is_over(self) -> bool:
        """Whether enough fragments are here."""
        return len(self.done) >= self._needed

    @property
    def is_hopeless(self) -> bool:
        """Whether the sources that are left do not have enough fragments."""
        return len(self.done | {fragment for fragment, sources in self._holders.items() if sources}) < self._needed

    def next(self, source: int, slow: int = 0) -> int | None:
        """The fragment that this source fetches now; None while there is none for it. Those first of which something
        is here, then low numbers: they are the content itself, so that less has to be computed. `slow`: how many of
        those that are coming hardly do; others are fetched beside them, and those count that are here first."""
        if len(self.done) + len(self._coming) - slow >= self._needed:
            return None
        for fragment in self._order:
            if fragment not in self.done and fragment not in self._coming and source in self._holders[fragment]:
                self._coming[fragment] = source
                return fragment
        return None

    def first(self) -> dict[int, int]:
        """The fragments with which the sources begin, by source."""
        found: dict[int, int] = {}
        for fragment in self._order:
            free = self._holders[fragment] - found.keys()
            if free and fragment not in self.done and len(self.done) + len(found) < self._needed:
                found[min(free)] = fragment
        self._coming = {fragment: source for source, fragment in found.items()}
        return found

    def fetched(self, fragment: int) -> None:
        """It is here, verified."""
        self._coming.pop(fragment, None)
        self.done.add(fragment)

    def lost(self, source: int) -> None:
        """This source is asked nothing more."""
        self._coming = {fragment: by for fragment, by in self._coming.items() if by != source}
        for sources in self._holders.values():
            sources.discard(source)


def fetched_folder(folder: Path, record: StateRecord) -> Path:
    """Where in `folder` the fragments of a state are while they are fetched."""
    return folder / f"{record.serial:016x}"


async def fetch_newest(
    sources: Sources,
    swarm: bytes,
    folder: Path,
    tell: Callable[[int, int], None],
    *,
    above: int = -1,
    here: Iterable[HeldState] = (),
    prepare: Callable[[FoundState], Awaitable[None]] | None = None,
) -> FetchedFragments | None:
    """Fetch enough fragments of the newest state that the sources give whole; None when they do not have one. A state
    that only liars had is given up for the one before.

    `tell(done, total)`: bytes. `above`: as of `newest_whole`. `here`: fragments that this machine has. `prepare`: is
    called before a state is fetched, and puts those into the state's `fetched_folder`. Raises `TooFew`, and what
    `prepare` raises.
    """
    failed: TooFew | None = None
    own = list(here)
    while True:
        nodes = list(sources.nodes)
        found = newest_whole([*(node.held.states for node in nodes), own], swarm, above)
        if found is None:
            if failed is not None:
                raise failed
            return None
        if prepare is not None:
            await prepare(found)
        try:
            fragments = await fetch_fragments(sources, nodes, found, folder, tell)
        except TooFew as error:  # at least one source was dropped, or what is here is not what it was
            failed = error
            own = [state for state in own if state.record != found.sealed]
        else:
            numbers = {number for some in found.holders.values() for number in some}
            said = {node.peer for number, node in enumerate(nodes) if number in numbers}
            return FetchedFragments(found, fragments, frozenset(said))


async def prove(conversation: Conversation, record: StateRecord, fragment: int) -> None:
    """Have a node send a segment of a fragment that it says it has. Which one cannot be foreseen.

    A node gets fragments from the seed alone, and gives them to the seed and to a holder of the swarm's key. So one
    that sends any segment was given the fragment. Raises `PeerError` when the segment has another digest, and what
    `Conversation` raises; the caller sets a deadline.
    """
    segment = secrets.randbelow(record.segments)
    size, hasher = record.bytes_of_segment(segment), blake3()
    body: Body = await conversation.ask(Fetch(record.serial, fragment, segment), Body)
    if body.size != size:
        raise _wrong_size(body.size, size)
    async for part in conversation.parts(size):
        hasher.update(part)
    if hasher.digest() != record.digest(fragment, segment):
        raise PeerError(f"saved state: segment {segment} has another digest")


def _wrong_size(size: int, due: int) -> PeerError:
    return PeerError(f"saved state: a segment of {size} bytes, not {due}")


async def fetch_fragments(
    sources: Sources, nodes: Sequence[NodeSource], found: FoundState, folder: Path, tell: Callable[[int, int], None]
) -> dict[int, Path]:
    """Fetch as many fragments of the state as it needs into `folder`; their files by number.

    `nodes`: the sources by the numbers in `found`. What an earlier attempt left in the folder counts, segment by
    segment. `tell(done, total)`: bytes. Raises `TooFew`.
    """
    record = found.record
    folder = fetched_folder(folder, record)
    await in_thread(_make_folder, folder)
    begun, whole = await in_thread(_begun, folder, record)
    holders = {part: [source for source in by if source < len(nodes)] for part, by in found.holders.items()}
    plan = FetchPlan(record.needed, holders, begun, whole)
    total, done = record.needed * record.fragment_bytes, dict.fromkeys(whole, record.fragment_bytes)
    changed = trio.Condition()
    moved_at: dict[int, float] = {}
    """By fragment that is coming: when its last segment came."""

    def path(fragment: int) -> Path:
        return folder / fragment_name(fragment)

    def note(fragment: int, size: int) -> None:
        done[fragment], moved_at[fragment] = size, trio.current_time()
        tell(min(sum(done.values()), total), total)

    async def another(number: int) -> int | None:
        """Wait for a fragment that this source can fetch; None: nothing is left to do."""
        async with changed:
            while (fragment := plan.next(number, slow())) is None and not (plan.is_over or plan.is_hopeless):
                with trio.move_on_after(LOOK_S):
                    await changed.wait()
            return None if plan.is_over else fragment

    async def work(number: int, fragment: int | None) -> None:
        while True:
            if fragment is None and (fragment := await another(number)) is None:
                return
            moved_at[fragment] = trio.current_time()
            with guarded(Source.STREAM, nodes[number].peer) as outcome:
                await _fetch(nodes[number], record, fragment, path(fragment), note)
            async with changed:
                moved_at.pop(fragment, None)
                if outcome.error is None:
                    plan.fetched(fragment)
                else:
                    plan.lost(number)
                    done.pop(fragment, None)
                    sources.drop(nodes[number], outcome.why)
                changed.notify_all()
            if plan.is_over:
                nursery.cancel_scope.cancel()  # of those that are too late
            if outcome.error is not None:
                return
            fragment = None

    def slow() -> int:
        now = trio.current_time()
        return sum(now - at > SLOW_S for at in moved_at.values())

    first = plan.first()
    async with trio.open_nursery() as nursery:
        for number in range(len(nodes)):
            nursery.start_soon(work, number, first.get(number))
    for node in nodes:
        if node.is_in_body:  # it was too late: its conversation stands in the middle of a segment
            sources.drop(node, "too slow")
    if not plan.is_over:
        raise TooFew(
            f"The nodes that answer give {len(plan.done)} of the {record.needed} fragments that are needed "
            f"({'; '.join(sources.errors[-3:])})."
        )
    return {fragment: path(fragment) for fragment in sorted(plan.done)}


def _begun(folder: Path, record: StateRecord) -> tuple[dict[int, int], list[int]]:
    """What is in the folder already: by fragment its bytes, and the fragments that are whole."""
    begun: dict[int, int] = {}
    whole: list[int] = []
    for fragment in range(record.total):
        path = folder / fragment_name(fragment)
        with contextlib.suppress(FileNotFoundError):
            begun[fragment] = path.with_name(path.name + TEMPORARY).stat().st_size
        if path.exists():
            begun[fragment] = record.fragment_bytes
            whole.append(fragment)
    return begun, whole


def _make_folder(folder: Path) -> None:
    with Disk().errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


async def _fetch(
    node: NodeSource, record: StateRecord, fragment: int, path: Path, note: Callable[[int, int], None]
) -> None:
    """Fetch what is missing of a fragment. Raises `PeerError` for a segment with another digest, and
    `trio.TooSlowError`."""
    coming = await in_thread(ComingFragment, Disk(), path, record, fragment)
    try:
        await in_thread(coming.resume)
        while coming.segment < record.segments:
            note(fragment, coming.segment * record.segment_bytes)
            size = record.bytes_of_segment(coming.segment)
            async with node.turn:
                node.is_in_body = True
                with trio.fail_after(SEGMENT_S + size / MIN_BYTES_S):
                    body: Body = await node.conversation.ask(Fetch(record.serial, fragment, coming.segment), Body)
                    if body.size != size:
                        raise _wrong_size(body.size, size)
                    async for part in node.conversation.parts(size):
                        await in_thread(coming.write, part)
                node.is_in_body = False
        await in_thread(coming.finish)
        note(fragment, record.fragment_bytes)
    finally:
        coming.close()
