"""A running machine of the council: it carries out what the core decides, and tells the application when to lead.

The effects of one event are carried out in their order, each completely before the next, by one task (the contract of
`swarm.protocol.council.events`). The application may act for the swarm from `wait_leading` until `wait_lost`.
"""

import random
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final

import structlog
import trio
from blake3 import blake3

from codec.errors import PeerError, SwarmError
from codec.sign import Key
from node.council.changes import encode_change
from node.council.journal import Journal
from node.council.kept import Kept, KeptFiles, check_name, kept_in
from node.council.links import CouncilLinks, FileHead, snapshot_head
from node.settings.council import CouncilAddress
from swarm.guard import Source, guarded
from swarm.protocol.council.events import (
    AskedToHandOver,
    CouncilEffect,
    CouncilEvent,
    CouncilHeard,
    Established,
    InstallSnapshot,
    Lead,
    Propose,
    Resign,
    SaveBallot,
    SendSnapshot,
    SendTo,
    SnapshotCame,
    StopLeading,
    StoreEntries,
    TakeOver,
    Tick,
    WakeAt,
)
from swarm.protocol.council.machine import CouncilMachine
from swarm.protocol.council.messages import (
    AskHeld,
    AskKept,
    CouncilMessage,
    Held,
    KeptHead,
    LacksKept,
    Position,
    SnapshotHead,
)
from swarm.protocol.council.timing import Timing
from swarm.runtime import in_thread
from swarm.transport.identity import peer_id

__all__ = ["CouncilService", "LeadLost", "boot_clock"]

_log = structlog.get_logger(__name__)
_QUEUED: Final = 512
_LOOK_S: Final = 0.5
"""The longest sleep: the boot clock goes on while the machine is suspended, and the sleep does not."""
_OFFER_EVERY_S: Final = 5.0
_SAY_AFTER_S: Final = 5.0
"""A version that has waited for a standby for so long is mentioned in the log."""


class LeadLost(SwarmError):
    """This machine leads no more, so what was to be stored may be lost."""


def boot_clock() -> float:
    """Seconds since this machine started, those included in which it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class CouncilService:
    """`run` runs the machine; all other methods are for its application, on the same event loop."""

    def __init__(
        self,
        home: Path,
        key: Key,
        machines: Sequence[CouncilAddress],
        journal: Journal,
        timing: Timing,
        *,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        """`journal`: of this machine, whose key in the council is `key`."""
        self.journal = journal
        self.holds: Callable[[bytes], Awaitable[bool]] | None = None
        """Whether this machine has all chunks of the version of a sealed manifest on disk; None: it cannot tell."""
        self._home, self._timing, self._clock = home, timing, clock
        by_key = {machine.key: machine for machine in machines}
        self._others = [machine for machine in by_key if machine != key.public]
        self.core = CouncilMachine(
            key.public, list(by_key), timing, random.Random(secrets.randbits(64)), journal.ballot(), journal.last,
            now=clock(),
        )  # fmt: skip
        self.kept = KeptFiles(home)
        self._links = CouncilLinks(key, by_key, home, self._heard, self._file_came)
        self._to_core, self._events = trio.open_memory_channel[tuple[CouncilEvent, trio.Event | None]](_QUEUED)
        """Events; with a proposal, what is set when it is established or given up."""
        self._wakes_at = 0.0
        self._snapshots: dict[tuple[bytes, Position], Path] = {}
        """By peer and position: the file of a snapshot."""
        self._sending: set[bytes] = set()
        """Machines to which a snapshot is being sent."""
        self._pushing: set[tuple[bytes, bytes]] = set()
        """(machine, digest) of the files that are being sent."""
        self._answering: set[bytes] = set()
        """Machines whose `AskHeld` is being looked into."""
        self._pending: list[tuple[int, trio.Event]] = []
        """By index, oldest first: who waits for an entry to be established."""
        self._proposed: list[trio.Event] = []
        """Of proposals that the core has not seen yet."""
        self._established = 0
        self._leading = trio.Event()
        self._lost: str | None = "it does not lead"
        """Why it does not lead; None: it does."""
        self._over = trio.Event()
        """Set when the lead is lost."""
        self._successor = b""
        """Whom to hand over to."""
        self._held: set[bytes] = set()
        self._asked_of = b""
        self._keeping: dict[bytes, tuple[Kept, set[bytes]]] = {}
        """By digest: a file of the trainer, and which other machines have it."""
        self._said = b""
        self._news = trio.Event()

    # ------------------------------------------------------------ for the application

    @property
    def is_leading(self) -> bool:
        """Whether this machine may act for the swarm now."""
        return self._lost is None and self.core.is_leading(self._clock())

    @property
    def other_leader(self) -> bytes:
        """The key of another machine that leads, as far as is known here; empty: none is known."""
        return b"" if self.core.leader == self.core.me else self.core.leader

    async def wait_leading(self) -> None:
        """Wait until this machine leads."""
        while self._lost is not None:
            await self._leading.wait()

    async def wait_lost(self) -> str:
        """Wait until this machine leads no more; why, in words."""
        while self._lost is None:
            await self._over.wait()
        return self._lost

    async def establish(self, body: bytes) -> None:
        """Have a majority store an entry; on return it is durable, and applied to this machine's journal. Raises
        `LeadLost` when that is not sure."""
        if not self.is_leading:
            raise LeadLost(f"This machine leads the swarm no more: {self._lost or 'its lease is over'}.")
        done = trio.Event()
        self._proposed.append(done)
        await self._to_core.send((Propose(body), done))
        await done.wait()
        if self._lost is not None:
            raise LeadLost(f"This machine leads the swarm no more: {self._lost}.")

    async def wait_until_held(self, sealed: bytes, version: str) -> None:
        """Wait until a majority, this machine included, has all chunks of this version. Raises `LeadLost`."""
        self._held, self._asked_of = set(), blake3(sealed).digest()
        began = trio.current_time()
        said = False
        while len(self._held) < (len(self._others) + 1) // 2:
            if self._lost is not None:
                raise LeadLost(f"This machine leads the swarm no more: {self._lost}.")
            for peer in self._others:
                if peer not in self._held:
                    self._links.send(peer, AskHeld(self.core.ballot.term, sealed))
            if not said and trio.current_time() - began > _SAY_AFTER_S:
                said = True
                _log.warning("waits_for_standby", version=version)
            self._news = trio.Event()
            with trio.move_on_after(self._timing.beat_s):
                await self._news.wait()

    async def keep(self, kept: Kept) -> None:
        """Have every machine take this file of `kept`, and establish that it counts once a majority has it. Raises
        `LeadLost`."""
        _, holders = self._keeping.setdefault(kept.digest, (kept, set()))
        while len(holders) < (len(self._others) + 1) // 2:
            if self._lost is not None:
                raise LeadLost(f"This machine leads the swarm no more: {self._lost}.")
            self._ask_kept(kept, holders)
            self._news = trio.Event()
            with trio.move_on_after(self._timing.beat_s):
                await self._news.wait()
        await self.establish(encode_change(records=[kept.record()]))
        for digest, (other, _) in list(self._keeping.items()):
            if other.name == kept.name and other != kept:
                del self._keeping[digest]
        await in_thread(self.kept.forget_older, kept)

    def _ask_kept(self, kept: Kept, holders: set[bytes]) -> None:
        for peer in self._others:
            if peer not in holders:
                self._links.send(peer, AskKept(self.core.ballot.term, kept.name, kept.digest, kept.size))

    async def _offer_kept(self) -> None:
        """While this machine leads: offer the files that count to machines that have come since."""
        while True:
            await self.wait_leading()
            with guarded(Source.CONTROL):
                for kept in kept_in(await in_thread(self.journal.records)):
                    if self.kept.has(kept):
                        self._ask_kept(*self._keeping.setdefault(kept.digest, (kept, set())))
            await trio.sleep(_OFFER_EVERY_S)

    async def resign(self) -> None:
        """The application has stopped: let another machine lead."""
        self._lose("it has stopped")
        await self._to_core.send((Resign(self._successor), None))
        self._successor = b""

    async def take_over(self) -> None:
        """A person wants this machine to lead."""
        await self._to_core.send((TakeOver(), None))

    # ------------------------------------------------------------ running

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. Raises `UsageError` when the port is in use or the disk is full."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._links.run)
            nursery.start_soon(self._watch_lease)
            nursery.start_soon(self._offer_kept)
            await self._perform(self.core.start(self._clock()))
            task_status.started()
            while True:
                event, done = await self._next_event()
                if done is not None and done.is_set():
                    continue  # it was given up when the lead was lost
                await self._perform(self.core.apply(event, self._clock()))
                if done is not None:
                    self._note_proposal(done)
                if isinstance(event, SnapshotCame):
                    self._drop_snapshot(event)
                self._say_leader()

    async def _next_event(self) -> tuple[CouncilEvent, trio.Event | None]:
        while True:
            left_s = self._wakes_at - self._clock()
            if left_s <= 0:
                await trio.lowlevel.checkpoint()
                return Tick(), None
            with trio.move_on_after(min(left_s, _LOOK_S)):
                return await self._events.receive()

    async def _perform(self, effects: list[CouncilEffect]) -> None:
        for effect in effects:
            match effect:
                case SaveBallot(ballot):
                    await in_thread(self.journal.save_ballot, ballot)
                case StoreEntries(entries):
                    await in_thread(self.journal.store, entries)
                case InstallSnapshot(peer, last):
                    await in_thread(self.journal.install, self._snapshots.pop((peer, last)), last)
                case SendTo(peer, message):
                    self._links.send(peer, message)
                case SendSnapshot(peer, term):
                    self._nursery.start_soon(self._send_snapshot, peer, term)
                case Lead(term):
                    self._begin(term)
                case Established(index):
                    self._establish_up_to(index)
                case StopLeading(why):
                    self._lose(why)
                case AskedToHandOver(to):
                    self._successor = to
                    self._lose("another machine was asked to take over")
                case WakeAt(at):
                    self._wakes_at = at

    async def _watch_lease(self) -> None:
        """Stop the application when the lease ends, also while the task of the core waits for a slow disk."""
        while True:
            if self._lost is not None:
                await self._leading.wait()
            left_s = self.core.leads_until(now := self._clock()) - now
            if left_s <= 0:
                self._lose("its lease is over")
            await trio.sleep(min(max(left_s, 0.01), _LOOK_S))

    # ------------------------------------------------------------ leading

    def _begin(self, term: int) -> None:
        self._lost, self._over = None, trio.Event()
        self._leading.set()
        _log.info("leads", term=term)

    def _lose(self, why: str) -> None:
        if self._lost is not None:
            return
        _log.warning("leads_no_more", why=why)
        self._lost, self._leading = why, trio.Event()
        self._over.set()
        waiting, self._pending = self._pending, []
        for _, done in waiting:
            done.set()
        for done in self._proposed:
            done.set()
        self._proposed.clear()

    def _note_proposal(self, done: trio.Event) -> None:
        """The core has added the entry of a proposal."""
        if done.is_set():
            return
        self._proposed.remove(done)
        index = self.core.last.index
        if index <= self._established:
            done.set()
        else:
            self._pending.append((index, done))

    def _establish_up_to(self, index: int) -> None:
        self._established = index
        while self._pending and self._pending[0][0] <= index:
            self._pending.pop(0)[1].set()

    # ------------------------------------------------------------ the other machines

    async def _heard(self, peer: bytes, message: CouncilMessage) -> None:
        match message:
            case AskHeld():
                if peer not in self._answering:
                    self._answering.add(peer)
                    self._nursery.start_soon(self._answer_held, peer, message)
            case Held(term, digest):
                if term == self.core.ballot.term and (digest == self._asked_of or digest in self._keeping):
                    (self._held if digest == self._asked_of else self._keeping[digest][1]).add(peer)
                    self._news.set()
            case AskKept(term, name, digest, size):
                if peer == self.core.leader:
                    has = await in_thread(self.kept.has, Kept(check_name(name), digest, size))
                    self._links.send(peer, Held(term, digest) if has else LacksKept(term, digest))
            case LacksKept(term, digest):
                if term == self.core.ballot.term and digest in self._keeping and (peer, digest) not in self._pushing:
                    self._pushing.add((peer, digest))
                    self._nursery.start_soon(self._push_kept, peer, self._keeping[digest][0])
            case SnapshotHead() | KeptHead():
                pass  # they belong on streams of their own
            case _:
                await self._to_core.send((CouncilHeard(peer, message), None))

    async def _answer_held(self, peer: bytes, message: AskHeld) -> None:
        try:
            if self.holds is not None and peer == self.core.leader and await self.holds(message.manifest):
                self._links.send(peer, Held(message.term, blake3(message.manifest).digest()))
        finally:
            self._answering.discard(peer)

    async def _push_kept(self, peer: bytes, kept: Kept) -> None:
        try:
            if await in_thread(self.kept.has, kept):
                await self._links.send_file(peer, KeptHead(self.core.ballot.term, *kept), self.kept.path(kept))
        finally:
            self._pushing.discard((peer, kept.digest))

    async def _send_snapshot(self, peer: bytes, term: int) -> None:
        if peer in self._sending:
            return
        self._sending.add(peer)
        file = self._home / f"council.{peer.hex()[:16]}.copy"
        try:
            file.unlink(missing_ok=True)
            last = await in_thread(self.journal.snapshot, file)
            if self.core.ballot.term == term:
                await self._links.send_file(peer, snapshot_head(term, last, file), file)
        finally:
            self._sending.discard(peer)
            file.unlink(missing_ok=True)

    async def _file_came(self, peer: bytes, head: FileHead, file: Path) -> None:
        if isinstance(head, KeptHead):
            if peer != self.core.leader or head.term != self.core.ballot.term:
                raise PeerError("kept file: not of this machine's leader")
            await in_thread(self.kept.take, Kept(check_name(head.name), head.digest, head.size), file)
            self._links.send(peer, Held(head.term, head.digest))
            return
        self._drop_snapshot(event := SnapshotCame(peer, head.term, head.last))
        self._snapshots[peer, head.last] = file
        await self._to_core.send((event, None))
        _log.info("snapshot_came", bytes=head.size)

    def _drop_snapshot(self, event: SnapshotCame) -> None:
        """Remove the file of a snapshot that the core did not want."""
        if (file := self._snapshots.pop((event.peer, event.last), None)) is not None:
            file.unlink(missing_ok=True)

    def _say_leader(self) -> None:
        leader = self.core.leader
        if leader and leader != self._said and leader != self.core.me:
            _log.info("stands_by", leader=peer_id(leader))
        self._said = leader or self._said
