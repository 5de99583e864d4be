"""The seed's end: brings the fragments of its newest saved state to nodes, and keeps them there.

    SWARM_HOME/state/SERIAL/        the newest state that was coded, and until that is placed the one before it
    SWARM_HOME/state/SERIAL/placed  which node was given which fragment
    SWARM_HOME/state/whole          the serial of the last state that was placed whole

Before a state is settled every fragment of it is durable at a node; only then are holders told to drop the one before.
So at every moment one whole state can be fetched back, whichever machine fails. Then the seed keeps the fragments,
looks now and then which of them are still held, and places those again whose holders have left: those of the last whole
state too, while a newer one is on its way. A node is believed to hold only what the seed has placed with it, or what it
proves to have by sending a part.

A seed without the newest state on its disk, after a takeover for example, adopts it from the nodes (`adopting`). That
state is then on its way like one that was coded here: whole once each fragment is at a node, wherever it was before.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from codec.errors import PeerError, UsageError
from codec.sign import Key
from codec.unpack import unpack
from node.saved.adopting import AdoptedState, Adopter, OnDisk
from node.saved.coding import CodedState, Progress, code_file
from node.saved.conversation import ANSWER_S, PART_BYTES, STATE_PROTOCOL, Conversation, Declined
from node.saved.fetching import SEGMENT_S, prove
from node.saved.messages import AskHeld, Done, Held, Place, Send, Settle
from node.saved.placement import Assignment, Placement, order_of
from node.saved.record import StateRecord
from swarm.guard import Source, guarded
from swarm.protocol.membership.roster import Member, Roster
from swarm.runtime.sessions.pacing import Paced, Pacer
from swarm.runtime.threads import in_thread
from swarm.store.disk import Disk
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.libp2p import Libp2pTransport

__all__ = ["HOLDERS", "STATE_FOLDER", "Placer"]

STATE_FOLDER: Final = "state"
"""In the seed's SWARM_HOME."""
HOLDERS: Final = 12
"""Nodes among which a state is spread, if there are so many: any six of them may be lost. More would not be safer in
practice, and each is a machine that has to be reached."""
AT_ONCE: Final = 4
"""Fragments that are sent at a time."""
CONNECT_S: Final = 20.0
ASK_S: Final = 30.0
"""For a node to be reached and to say what it holds: a round waits for all of them."""
ABLE_S: Final = 10.0
"""For a node to say that it holds fragments: until all have said so, or have not, no fragment is made."""
LOOK_S: Final = 1.0
"""Interval at which missing fragments are looked for while a state is being placed."""
KEEP_LOOK_S: Final = 60.0
"""The same once it is placed: a lost holder's fragment is placed again within this and the time of its lease."""
PLACE_S: Final = 60.0
MIN_BYTES_S: Final = 250_000
"""A fragment is at its node within `PLACE_S`, and a second more for each `MIN_BYTES_S`, or that has failed. What has
come to the node stays there for the next attempt."""
DISK_BYTES_S: Final = 20e6
"""At which a node's busy disk reads or syncs a fragment, before it answers."""
STUCK_S: Final = 180.0
"""A state that no node may be asked to take anything of, for so long, is not waited for any longer."""
ASKED: Final = 2 * HOLDERS
"""Nodes that are asked what they hold."""
SPOOLED_KEPT_S: Final = 86_400.0
"""A file that a trainer put here to be coded, and has not removed for a day, is nobody's any more."""
_PLACED: Final = "placed"
_WHOLE: Final = "whole"
_log = structlog.get_logger(__name__)


class _Kept:
    """A coded state, and where its fragments are. A round of it holds `turn`, and `scope` ends the round."""

    def __init__(self, state: CodedState, said: frozenset[bytes] = frozenset()) -> None:
        """`said`: nodes that say they have fragments of it."""
        self.state, self.said = state, said
        self.placement = Placement(state.record.total, _read_placed(state.folder))
        self.turn, self.scope = trio.Lock(), trio.CancelScope()
        self.settled = trio.Event()
        self.why = "none has answered"
        """Why a fragment was not placed, the last time."""


class Placer:
    """The saved states of one seed. `run` places; `save` codes a new one and waits until it is placed."""

    def __init__(
        self,
        key: Key,
        folder: Path,
        transport: Libp2pTransport,
        roster: Callable[[], Roster | None],
        pacer: Pacer,
        own: Path | None = None,
    ) -> None:
        """`folder`: `STATE_FOLDER` in the home. `pacer`: of this machine's uplink. `own`: folder of the fragments that
        this machine held as a node, before it took over."""
        self._key, self._folder, self._transport, self._roster, self._pacer = key, folder, transport, roster, pacer
        self._whole = 0
        """Serial of the last state that was placed whole."""
        self._last_whole: _Kept | None = None
        """That state, if it is on this disk."""
        self._coming: _Kept | None = None
        """A newer one, which is not placed whole yet."""
        self._saving = trio.Lock()
        self._opened = trio.Event()
        """Set when it is known what an earlier run left."""
        self._wake, self._replaced = trio.Event(), trio.Event()
        """Set when there is another `_coming`, or `_last_whole`."""
        self._noting = trio.Lock()
        """Held while it is noted on disk what was placed with whom."""
        self._adopter = Adopter(key, folder, transport, self._members, self._on_disk, self._take_adopted, own)

    # ------------------------------------------------------------ a new state

    async def save(self, source: Path, step: int, tell: Callable[[str, int, int], None]) -> CodedState:
        """Code the file `source` and place it with nodes. Returns once every fragment is durable at a node.

        `tell(stage, done, total)`: bytes of content that are coded ("coding"), then fragments that are held
        ("placing"); called from the event loop or a worker thread. States are saved one after the other. When it is
        cancelled in the first stage, nothing is left of it; in the second, the placing goes on.

        Raises `UsageError` when no node is there, when for `STUCK_S` no node takes a fragment (at once, when another
        state waits to be saved), and what `code_file` raises.
        """
        async with self._saving:
            await self._opened.wait()
            able = await self._able(self._members()[:ASKED])
            if not able:
                raise UsageError(
                    "No node is there that holds fragments of a state: nodes join with a ticket (swarm-node "
                    "invite), and give disk (join --state-gb)."
                )
            async with self._adopter.held_back():
                serial = max(self._last_serial() + 1, time.time_ns() // 1_000_000)
                await self._give_up_coming(serial)
                kept = _Kept(await self._code(source, serial, step, min(HOLDERS, able), tell))
                kept.placement.note_members([member.peer for member in self._members()])
                self._coming = kept
            self._wake.set()
            await self._until_settled(kept, tell)
            return kept.state

    async def _give_up_coming(self, serial: int) -> None:
        """End the round of a state that is not whole yet, however slow its nodes are: the one with this serial takes
        its place, and its room on the disk."""
        if (old := self._coming) is not None:
            old.scope.cancel()
            async with old.turn:
                if self._coming is old:
                    self._coming = None
        await self._forget_before(serial)

    async def _code(
        self, source: Path, serial: int, step: int, total: int, tell: Callable[[str, int, int], None]
    ) -> CodedState:
        """Code a state in a thread, which ends when this is cancelled."""
        folder = self._folder / _name(serial)

        def progress(done: int, size: int) -> None:
            trio.from_thread.check_cancelled()
            tell("coding", done, size)

        is_coded = False
        try:
            state = await in_thread(_code, source, folder, self._key, serial, step, total, progress)
            is_coded = True
            return state
        finally:
            if not is_coded:
                with trio.CancelScope(shield=True):
                    await in_thread(Disk().remove, folder)

    async def _until_settled(self, kept: _Kept, tell: Callable[[str, int, int], None]) -> None:
        """Raises `UsageError` when no node takes a fragment."""
        stuck_since: float | None = None
        while not kept.settled.is_set():
            tell("placing", len(kept.placement.holders), kept.placement.total)
            now = trio.current_time()
            if not kept.placement.is_stuck(now):
                stuck_since = None
            elif stuck_since is None:
                stuck_since = now
            is_awaited = self._saving.statistics().tasks_waiting > 0
            if stuck_since is not None and (is_awaited or now - stuck_since > STUCK_S):
                raise UsageError(
                    f"No node takes another fragment of this state ({kept.why}). Free disk on the nodes, or let "
                    "them give more (join --state-gb); they are asked again every ten minutes."
                )
            with trio.move_on_after(LOOK_S / 4):
                await kept.settled.wait()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where those holders of the last whole state listen that can be dialed."""
        holders = set() if self._last_whole is None else set(self._last_whole.placement.holders.values())
        return tuple(
            dict.fromkeys(member.addrs[0] for member in self._members() if member.peer in holders and member.dialable)
        )

    def states(self) -> list[tuple[StateRecord, list[PeerKey]]]:
        """The last whole state, and a newer one on its way: the record of each, and the node of each fragment that has
        one."""
        kept = [each for each in (self._last_whole, self._coming) if each is not None]
        return [(each.state.record, list(each.placement.holders.values())) for each in kept]

    @property
    def whole(self) -> int:
        """Serial of the last whole state; 0: there is none."""
        return self._whole

    def _last_serial(self) -> int:
        """Of all states that are known, here and at nodes: nodes refuse one that is older than theirs."""
        return max(self._whole, self._adopter.newest, self._on_disk().serial)

    def _on_disk(self) -> OnDisk:
        kept = [each.state.record.serial for each in (self._last_whole, self._coming) if each is not None]
        return OnDisk(max(kept, default=0), self._whole)

    async def _take_adopted(self, adopted: AdoptedState) -> None:
        kept = _Kept(adopted.state, adopted.said)
        await self._give_up_coming(kept.state.record.serial)
        self._coming = kept
        self._wake.set()

    async def _forget_before(self, serial: int) -> None:
        """Remove older states than this one, except the last that was placed whole."""
        for folder in await in_thread(lambda: sorted(self._folder.glob("[!.]*/"))):
            if folder.name < _name(serial) and folder.name != _name(self._whole):
                await in_thread(Disk().remove, folder)

    async def _able(self, members: Sequence[Member]) -> int:
        """How many of these nodes hold fragments: not relays, nor earlier releases."""
        able: list[bytes] = []

        async def ask(member: Member) -> None:
            with guarded(Source.STREAM, member.peer), trio.fail_after(ABLE_S):
                async with self._talking(member) as conversation:
                    self._adopter.note(await conversation.ask(AskHeld(), Held))
                    able.append(member.peer)

        async with trio.open_nursery() as nursery:
            for member in members:
                nursery.start_soon(ask, member)
        return len(able)

    # ------------------------------------------------------------ placing

    async def run(self) -> None:
        """Place fragments until cancelled. A state that is on its way does not keep the last whole one waiting."""
        await in_thread(self._open)
        self._opened.set()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._place_coming)
            nursery.start_soon(self._keep_whole)
            nursery.start_soon(self._adopter.run)

    async def _place_coming(self) -> None:
        while True:
            if (kept := self._coming) is not None:
                await self._round(kept)
            with trio.move_on_after(LOOK_S):
                await self._wake.wait()
            self._wake = trio.Event()

    async def _keep_whole(self) -> None:
        while True:
            if (kept := self._last_whole) is not None:
                await self._round(kept)
            with trio.move_on_after(KEEP_LOOK_S):
                await self._replaced.wait()
            self._replaced = trio.Event()

    def _open(self) -> None:
        """Find what an earlier run left: the last state that was placed whole, and a newer one that was coded."""
        for path in self._folder.glob(".coming-*"):  # of a trainer that was killed while it saved
            with contextlib.suppress(FileNotFoundError):  # its trainer may remove it just now
                if time.time() - path.stat().st_mtime > SPOOLED_KEPT_S:
                    path.unlink()
        with contextlib.suppress(FileNotFoundError, ValueError):
            self._whole = int((self._folder / _WHOLE).read_text(), 16)
        for folder in sorted(self._folder.glob("*/")):
            with contextlib.suppress(OSError, PeerError):
                kept = _Kept(CodedState.open(folder, self._key.public))
                if kept.state.record.serial > self._whole:
                    self._coming = kept
                elif kept.state.record.serial == self._whole:
                    self._last_whole = kept

    async def _round(self, kept: _Kept) -> None:
        """Ask who holds what, send what is missing, and settle the state once nothing is."""
        async with kept.turn:
            with trio.CancelScope() as kept.scope:
                members = self._members()
                by_peer = {member.peer: member for member in members}
                kept.placement.note_members([member.peer for member in members])
                await self._ask_all(kept, members)
                async with trio.open_nursery() as nursery:
                    for _ in range(AT_ONCE):
                        nursery.start_soon(self._place_some, kept, by_peer)
                if kept is self._coming and kept.placement.is_whole:
                    try:
                        await self._settle(kept)
                    except UsageError as error:  # a full disk; the state waits until there is room
                        _log.warning("state_waits", why=str(error))

    async def _ask_all(self, kept: _Kept, members: Sequence[Member]) -> None:
        """Ask those that have fragments of the state, or are likely to get some, what they hold."""
        first = {member.peer for member in members[:ASKED]} | kept.placement.given_to | kept.said
        async with trio.open_nursery() as nursery:
            for member in members:
                if member.peer in first:
                    nursery.start_soon(self._ask_held, kept, member)

    async def _ask_held(self, kept: _Kept, member: Member) -> None:
        """Ask a node what it holds. The last whole state is settled with each node that has a fragment of any: its
        lease begins anew, and older ones go."""
        record, placement = kept.state.record, kept.placement
        is_proving = False
        with guarded(Source.STREAM, member.peer) as outcome, trio.fail_after(ASK_S) as limit:
            async with self._talking(member) as conversation:
                held: Held = await conversation.ask(AskHeld(), Held)
                self._adopter.note(held, kept.state.sealed)
                mine = [each.fragments for each in held.states if each.record == kept.state.sealed]
                said = mine[0] if mine else ()
                placement.note_held(member.peer, said)
                if self._whole and held.states:
                    await conversation.ask(Settle(self._whole), Done)
                if to_prove := placement.to_prove(member.peer, said):
                    is_proving = True
                    limit.deadline += SEGMENT_S + record.bytes_of_segment(0) / MIN_BYTES_S  # for all of them
                    for fragment in to_prove:
                        await prove(conversation, record, fragment)
                        placement.proved(member.peer, fragment)
                    await self._note_placed(kept)
        if outcome.error is not None and is_proving:
            placement.doubted(member.peer)

    async def _place_some(self, kept: _Kept, by_peer: dict[bytes, Member]) -> None:
        placement = kept.placement
        while (assignment := placement.next(trio.current_time())) is not None:
            refused = False
            try:
                with guarded(Source.STREAM, assignment.peer) as outcome:
                    if (member := by_peer.get(assignment.peer)) is None:
                        raise Unreachable("it has left the swarm")
                    try:
                        await self._place(kept.state, assignment, member)
                    except Declined:
                        refused = True
                        raise
            finally:
                placement.interrupted(assignment)
            if outcome.error is None:
                placement.placed(assignment)
                await self._note_placed(kept)
            else:
                placement.failed(assignment, trio.current_time(), refused=refused)
                kept.why = outcome.why
                _log.info("fragment_not_placed", peer=assignment.peer, why=outcome.why)

    async def _place(self, state: CodedState, assignment: Assignment, member: Member) -> None:
        size = state.record.fragment_bytes
        with trio.fail_after(PLACE_S + size / MIN_BYTES_S):
            async with self._talking(member) as conversation:
                within_s = ANSWER_S + size / DISK_BYTES_S
                question = Place(state.sealed, assignment.fragment, self._whole)
                answer = await conversation.ask(question, Send | Done, within_s)
                if isinstance(answer, Done):
                    return
                if answer.segment > state.record.segments:
                    raise PeerError("saved state: it has more segments than there are")
                with await in_thread(open, state.path(assignment.fragment), "rb") as file:
                    file.seek(answer.segment * state.record.segment_bytes)
                    while part := await in_thread(file.read, PART_BYTES):
                        await conversation.send_part(part)
                await conversation.expect(Done, within_s)

    async def _note_placed(self, kept: _Kept) -> None:
        """Note on disk what was placed with whom, and proven: after a restart a node is believed that, and no more."""
        async with self._noting:
            # With a full disk it is lost: then nodes are asked to take what they have, and say so.
            with contextlib.suppress(UsageError, OSError):
                data = msgspec.msgpack.encode(sorted(kept.placement.given))
                await in_thread(Disk().write_whole, kept.state.folder / _PLACED, data)

    async def _settle(self, kept: _Kept) -> None:
        """Every fragment is held: from now on this state counts, and older ones may go."""
        record = kept.state.record
        await in_thread(Disk().write_whole, self._folder / _WHOLE, f"{record.serial:x}".encode())
        if self._last_whole is not None:
            self._last_whole.scope.cancel()
        self._whole, self._last_whole, self._coming = record.serial, kept, None
        _log.info("state_saved", step=record.step, bytes=record.size, fragments=record.total)
        kept.settled.set()
        self._replaced.set()
        await self._forget_before(record.serial)

    # ------------------------------------------------------------ nodes

    def _members(self) -> list[Member]:
        """The nodes of the swarm, in the order in which they are tried."""
        roster = self._roster()
        members = {} if roster is None else {member.peer: member for member in roster.members}
        order = order_of(self._key.public, ((member.peer, member.dialable) for member in members.values()))
        return [members[peer] for peer in order]

    @contextlib.asynccontextmanager
    async def _talking(self, member: Member) -> AsyncIterator[Conversation]:
        """A conversation with a node. Raises `Unreachable`, and what `Conversation` raises."""
        with trio.fail_after(CONNECT_S):
            await self._transport.connect(member.peer, member.addrs)
            stream = await self._transport.open_bulk_stream(member.peer, STATE_PROTOCOL)
        paced = Paced(stream, self._pacer)

        async def write(part: bytes | memoryview) -> None:
            await paced.send([part], deferrable=True)

        async with stream:
            yield Conversation(stream, write)


def _name(serial: int) -> str:
    return f"{serial:016x}"


def _code(source: Path, folder: Path, key: Key, serial: int, step: int, total: int, progress: Progress) -> CodedState:
    return code_file(source, folder, key, serial=serial, step=step, total=total, progress=progress)


_placed_decoder = msgspec.msgpack.Decoder(set[tuple[int, bytes]])


def _read_placed(folder: Path) -> set[tuple[int, bytes]]:
    """What an earlier run placed with whom: fragments and nodes."""
    try:
        return unpack(_placed_decoder, (folder / _PLACED).read_bytes(), "saved state")
    except (OSError, PeerError):
        return set()
