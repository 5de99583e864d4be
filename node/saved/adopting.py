"""Brings the newest saved state of the nodes to a seed that has none, or an older one: after a takeover, on a new disk.

    members --AskHeld--> newest state above those on this disk --Fetch--> enough of its fragments, verified
      --> SWARM_HOME/state/.adopting/SERIAL: all fragments, computed and verified, then the record
      --> SWARM_HOME/state/SERIAL, by one rename

So the state is there as if this seed had coded it, or it is not there. What an interrupted attempt has fetched stays in
`.adopting` for the next one. A node that says it has a state proves nothing by that: a record counts if the swarm's key
has signed it, and a segment if it has the digest in that record.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import structlog
import trio

from codec.errors import PeerError, UsageError
from codec.sign import Key
from node.saved.coding import CodedState, check_room, complete_fragments, fragment_name
from node.saved.conversation import PART_BYTES
from node.saved.fetching import FoundState, fetch_newest, fetched_folder
from node.saved.folder import ComingFragment, FragmentFolder
from node.saved.messages import Held, HeldState
from node.saved.record import StateRecord
from node.saved.sources import SignedRecords, Sources
from swarm.guard import Source, guarded
from swarm.protocol.membership.roster import Member
from swarm.runtime.threads import in_thread
from swarm.store.disk import Disk
from swarm.transport.libp2p import Libp2pTransport

__all__ = ["AdoptedState", "Adopter", "OnDisk"]

LOOK_S: Final = 1.0
"""Interval at which is looked whether a state is to be adopted, and whether members are there."""
AGAIN_S: Final = 5.0
"""Pause after the first attempt that failed; it doubles with each one, up to `MOST_AGAIN_S`."""
MOST_AGAIN_S: Final = 600.0
LOOK_FOR_S: Final = 3_600.0
"""A seed that has no state, and has heard of none for so long, stops asking: nearly always none was ever saved, and to
ask a thousand nodes takes a thousand connections."""
_ADOPTING: Final = ".adopting"
_log = structlog.get_logger(__name__)


class OnDisk(NamedTuple):
    """What the seed has. `serial`: of the newest state on its disk; 0: none. `whole`: of the last state that was placed
    whole, on its disk or not; older ones are refused by nodes."""

    serial: int
    whole: int


class AdoptedState(NamedTuple):
    """A state that is on this disk now. `said`: nodes that said they hold fragments of it."""

    state: CodedState
    said: frozenset[bytes]


class Adopter:
    """One for a seed. `run` looks for a state to adopt, and gives it to `take`; one attempt at a time."""

    def __init__(
        self,
        key: Key,
        folder: Path,
        transport: Libp2pTransport,
        members: Callable[[], Sequence[Member]],
        on_disk: Callable[[], OnDisk],
        take: Callable[[AdoptedState], Awaitable[None]],
        own: Path | None = None,
    ) -> None:
        """`key`: the swarm's. `folder`: of the seed's states. `members()`: in the order in which they are asked.
        `take(adopted)` is called with a state that is newer than `on_disk()`; it may be cancelled. `own`: the folder of
        the fragments that this machine held as a node."""
        self._own = own
        self._key, self._folder, self._transport, self._members = key, folder, transport, members
        self._on_disk, self._take = on_disk, take
        self.newest = 0
        """The highest serial of a signed record that a node has named."""
        self._turn = trio.Lock()
        """Held during an attempt, and by `held_back`."""
        self._scope = trio.CancelScope()
        self._wake = trio.Event()
        self._look_until = 0.0
        """Until then nodes are asked although none has named a state."""
        self._may_be_left = True
        """Whether an attempt, perhaps of an earlier run, may have left something in `_ADOPTING`."""

    def note(self, held: Held, known: bytes = b"") -> None:
        """A node says what it holds. `known`: a record that needs no look."""
        signed = SignedRecords(self._key.public)
        signed.of(Held(tuple(state for state in held.states if state.record != known), ()))
        self._note_newest(signed)

    def _note_newest(self, signed: SignedRecords) -> None:
        if (newest := signed.newest) is not None and newest.serial > self.newest:
            self.newest = newest.serial
            self._wake.set()

    @contextlib.asynccontextmanager
    async def held_back(self) -> AsyncIterator[None]:
        """End an attempt, and make none while the block runs: a newer state is being coded."""
        self._scope.cancel()
        async with self._turn:
            try:
                yield
            finally:
                self._wake.set()

    async def run(self) -> None:
        """Adopt until cancelled, as often as nodes have a newer state than this disk."""
        pause_s, said = AGAIN_S, ""
        self._look_until = trio.current_time() + LOOK_FOR_S
        while True:
            why: str | None = ""
            with trio.CancelScope() as self._scope:
                async with self._turn:
                    why = await self._attempt()
            if why and why != said:
                _log.warning("state_not_adopted", why=why)
            if why is not None:
                said = why
            self._wake = trio.Event()
            with trio.move_on_after(LOOK_S if why is None else pause_s):
                await self._wake.wait()
            if why is not None:
                pause_s = AGAIN_S if self._wake.is_set() else min(2 * pause_s, MOST_AGAIN_S)

    async def _attempt(self) -> str | None:
        """Try once. Returns why nothing was adopted, "" when something was or there is nothing, and None when no node
        was asked."""
        on_disk, members = self._on_disk(), self._members()
        try:
            with guarded(Source.STREAM, "the nodes that hold saved states") as outcome:
                if on_disk.serial and self.newest <= on_disk.serial:
                    if self._may_be_left:
                        await in_thread(Disk().remove, self._folder / _ADOPTING)
                    self._may_be_left = False
                    return None
                if not members or (not self.newest and trio.current_time() > self._look_until):
                    return None
                self._may_be_left = True
                await self._adopt(members, max(on_disk.serial, on_disk.whole - 1))
        except UsageError as error:  # a full disk, or nodes that do not give enough
            return str(error)
        return outcome.why

    async def _adopt(self, members: Sequence[Member], above: int) -> None:
        """Adopt the newest state with a higher serial than `above`, if there is one. Raises `UsageError` or `PeerError`
        when there is one that cannot be adopted, perhaps in a group."""
        folder = self._folder / _ADOPTING
        own = None if self._own is None else await in_thread(FragmentFolder, self._own, self._key.public, 0)

        async def prepare(found: FoundState) -> None:
            await in_thread(_make_room, folder, found.record)
            if own is not None:
                await in_thread(_copy_own, own, folder, found)

        async with Sources.among(self._transport, self._key, members) as sources:
            here = () if own is None else sources.signed.of(Held(await in_thread(own.held), ()))
            self._note_newest(sources.signed)
            newest = sources.signed.newest
            if newest is None or newest.serial <= above:
                return
            answered = len(sources.nodes)
            here += await in_thread(_left_in, folder, sources.signed)
            fetched = await fetch_newest(
                sources, self._key.public, folder, lambda done, total: None, above=above, here=here, prepare=prepare
            )
        if fetched is None:
            raise UsageError(
                f"The nodes that answer and hold fragments ({answered}) do not have the {newest.needed} that the state "
                f"of step {newest.step} needs."
            )
        record = fetched.found.record
        state = await in_thread(_complete, self._folder, folder, record, fetched.found.sealed)
        await self._take(AdoptedState(state, fetched.said))
        _log.info("state_adopted", step=record.step, bytes=record.size, fragments=record.total)


def _left_in(folder: Path, signed: SignedRecords) -> tuple[HeldState, ...]:
    """The fragments that an earlier attempt has fetched whole."""
    found = []
    for sealed, record in signed.records:
        mine = fetched_folder(folder, record)
        whole = tuple(number for number in range(record.total) if (mine / fragment_name(number)).exists())
        found.append(HeldState(sealed, whole))
    return tuple(found)


def _copy_own(own: FragmentFolder, folder: Path, found: FoundState) -> None:
    """Copy the fragments that this machine held as a node, as far as they are what the record says. In a thread that is
    cancelled with its task."""
    record, mine = found.record, fetched_folder(folder, found.record)
    mine.mkdir(exist_ok=True, mode=0o700)
    for fragment in [number for state in own.held() if state.record == found.sealed for number in state.fragments]:
        if (mine / fragment_name(fragment)).exists():
            continue
        with contextlib.closing(ComingFragment(Disk(), mine / fragment_name(fragment), record, fragment)) as coming:
            coming.resume()
            with contextlib.suppress(PeerError):  # it has changed on this disk; a node may have it
                while coming.segment < record.segments:
                    trio.from_thread.check_cancelled()
                    _copy_segment(own, coming, record.serial, fragment)
                coming.finish()


def _copy_segment(own: FragmentFolder, coming: ComingFragment, serial: int, fragment: int) -> None:
    if (opened := own.open_segment(serial, fragment, coming.segment)) is None:
        raise PeerError("saved state: the fragment is not here any more")
    file, left = opened
    with file:
        while left:
            if not (part := file.read(min(left, PART_BYTES))):
                raise PeerError("saved state: the fragment is too short")
            coming.write(part)
            left -= len(part)


def _make_room(folder: Path, record: StateRecord) -> None:
    """Make the folder for fragments, and remove those of other states if they are in the way. Raises `UsageError`."""
    disk, mine = Disk(), fetched_folder(folder, record)
    with disk.errors(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        here_bytes = sum(path.stat().st_size for path in mine.glob("*"))
        try:
            check_room(folder, record, here_bytes)
        except UsageError:
            for other in folder.glob("*"):
                if other != mine:
                    disk.remove(other)
            check_room(folder, record, here_bytes)


def _complete(states: Path, folder: Path, record: StateRecord, sealed: bytes) -> CodedState:
    """Make a whole state of the fragments in `folder`, and put it into `states`. In a thread that is cancelled with its
    task. Raises `PeerError` when a fragment has changed on this disk, and `UsageError`."""

    def progress(done: int, size: int) -> None:
        trio.from_thread.check_cancelled()

    disk, mine = Disk(), fetched_folder(folder, record)
    complete_fragments(mine, record, sealed, progress)
    disk.remove(states / mine.name)  # what is left of a damaged one
    disk.put_in_place(mine, states / mine.name)
    return CodedState.open(states / mine.name, record.swarm)
