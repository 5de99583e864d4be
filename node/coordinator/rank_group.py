"""The ranks of one trainer, as the coordinator sees them: they publish a version together, or not at all.

Rank 0 begins a version. Each rank sends the blocks that it encoded, in any order, then the ranges that it had and the
root over their hashes. When all ranks have done so and the ranges cover the whole model, the version is sealed and all
ranks are told. An error of one rank ends the version for all; each rank is told why, and has to attach again.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
import trio

from codec import chunk_target, state_root
from codec.errors import PeerError, SwarmError, UsageError
from codec.pack import MIN_CHUNK_BYTES
from codec.parts import Part
from node.coordinator.publisher import Publisher
from node.coordinator.shared_blocks import read_shared, record_end
from node.coordinator.turns import Busy, Turn, Turns
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed, close_fds
from node.ipc.ring import RingReader
from node.ipc.sockets import process_named
from node.trainers.messages import (
    Attach,
    Delta,
    GoBack,
    PublishBegin,
    PublishEnd,
    PublishOpened,
    PublishSealed,
    Refusal,
    SharedDelta,
    WentBack,
)
from node.trainers.ranks.peers import have, named

__all__ = ["RankGroup", "RankGroups"]

GATHER_WITHIN_S: Final = 60.0
"""For the first version. All ranks attach within moments of one another; after a restart of the seed each attaches when
it next looks for it."""
RETURN_WITHIN_S: Final = 10.0
"""For later versions: a rank that hung up comes back at once, or not at all."""
BATCHES_A_CHUNK: Final = 4
"""Ranks send blocks in batches of a fraction of a chunk, so that a chunk leaves as soon as it is full; but not in
smaller ones than the smallest chunk, since each costs the seed a turn of its loop."""


class RankGroup:
    """One trainer's ranks, which publish one part of the model. `open`: they are publishing a version."""

    def __init__(self, publisher: Publisher, turns: Turns, world: int, part: Part) -> None:
        self._publisher = publisher
        self._turns = turns
        self._turn: Turn | None = None
        self.part = part
        self._view = publisher.view(part)
        self.world = world
        self._members: dict[int, AsyncChannel] = {}
        self._arrived = trio.Event()
        self._met = False
        """All ranks were attached at the same time once."""
        self._ended: dict[int, PublishEnd] = {}
        self._sending = trio.Lock()
        self.open = False
        self._sealing: int | None = None
        """The last rank to end: the version is being sealed, even if other ranks hang up."""

    def __bool__(self) -> bool:
        return bool(self._members)

    def join(self, rank: int, channel: AsyncChannel) -> None:
        self._members[rank] = channel
        self._arrived.set()
        self._arrived = trio.Event()

    def has(self, rank: int, channel: AsyncChannel) -> bool:
        """Whether `channel` is the current connection of `rank`."""
        return self._members.get(rank) is channel

    async def begin(self, message: PublishBegin) -> None:
        """Wait for all ranks and for this trainer's turn, open the version, and tell the ranks. Raises `UsageError`,
        `Busy`, and `ChannelClosed` when rank 0 hangs up meanwhile."""
        await self._gather()
        await self._take_turn()
        try:
            attempt = await self._publisher.begin(message.again, message.expected_bytes, message.step, self.part)
        except BaseException:
            self._end_turn()
            raise
        self.open, self._ended = True, {}
        self._check_all_here()
        batch_bytes = max(MIN_CHUNK_BYTES, chunk_target(attempt.expected_bytes) // BATCHES_A_CHUNK)
        await self._tell(
            PublishOpened(
                message.number, attempt.epoch, attempt.version, attempt.attempt, self._view.root,
                batch_bytes, self._publisher.seed.coder(), ring=True, base_values=self._view.base_values,
            )
        )  # fmt: skip

    async def add(self, deltas: Sequence[Delta]) -> None:
        """Add blocks of one rank; ranks take turns. Waits while the store is behind."""
        async with self._sending:
            await self._publisher.add([delta.unwrap() for delta in deltas])

    async def add_shared(self, deltas: Sequence[SharedDelta], ring: RingReader) -> None:
        """As `add`, with blocks in the rank's ring. Raises `PeerError`."""
        read = [read_shared(delta, ring, self._view) for delta in deltas]
        if deltas:
            ring.give_back(record_end(deltas[-1], self._view.layout))
        async with self._sending:
            await self._publisher.add([delta for delta, _ in read], [block for _, block in read if block is not None])

    async def end(self, rank: int, message: PublishEnd) -> None:
        """This rank has sent all of its blocks; the last rank to do so seals the version. Raises `PeerError`."""
        if rank in self._ended:
            raise PeerError("publish.end: came twice")
        self._check(message)
        self._ended[rank] = message
        if len(self._ended) < self.world:
            return
        root = self._whole()
        changed = sum(ended.changed for ended in self._ended.values())
        self._sealing = rank
        sealed = await self._publisher.end(changed, root)
        self.open, self._sealing = False, None
        self._end_turn()
        await self._tell(PublishSealed(sealed.part_root, sealed.payload_bytes, sealed.chunks, changed, sealed.root))

    async def go_back(self, message: GoBack) -> None:
        """Return to an older version from what the seed keeps, and tell all ranks. Raises `UsageError`, `Busy`."""
        await self._gather()
        await self._take_turn()
        try:
            head = await self._publisher.go_back(message.wanted)
        finally:
            self._end_turn()
        await self._tell(WentBack(message.number, head.epoch, head.version, head.root, head.payload_bytes))

    async def leave(self, rank: int, channel: AsyncChannel, why: SwarmError | None) -> None:
        """This connection has ended. An open version ends with it, for all ranks."""
        if not self.has(rank, channel):
            return
        del self._members[rank]
        if self._sealing not in (None, rank) or (not self.open and why is None):
            return
        others, self._members = self._members, {}
        text = str(why) if why is not None else f"Rank {rank} of {self.world} went away in the middle of a version."
        for other in others.values():
            with trio.move_on_after(1.0):
                await _try(other, Refusal(text, usage=isinstance(why, UsageError)))
            other.close()
        if self.open:
            self.open, self._sealing = False, None
            try:
                await self._publisher.abandon()
            finally:
                self._end_turn()

    async def _take_turn(self) -> None:
        """Wait for the turn to publish, while rank 0 stays connected: it says nothing until it has its turn."""
        leader = self._members.get(0)
        if leader is None:
            raise ChannelClosed("rank 0 has ended")
        error: BaseException | None = None
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                nonlocal error
                try:
                    message, fds = await leader.recv()
                    close_fds(fds)
                    error = PeerError(f"publish: {type(message).__name__} out of turn")
                except (ChannelClosed, PeerError) as found:
                    error = found
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            try:
                self._turn = await self._turns.take(self.part, process_named(leader.pid))
            except Busy as found:
                error = found
            nursery.cancel_scope.cancel()
        if error is not None:
            self._end_turn()
            raise error

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.end()

    async def _gather(self) -> None:
        with trio.move_on_after(RETURN_WITHIN_S if self._met else GATHER_WITHIN_S) as waiting:
            while len(self._members) < self.world:
                await self._arrived.wait()
        if waiting.cancelled_caught:
            self._check_all_here()
        self._met = True

    def _check_all_here(self) -> None:
        missing = [rank for rank in range(self.world) if rank not in self._members]
        if missing:
            who = named(missing, self.world).capitalize()
            if self._met:
                raise UsageError(f"{who} {have(missing)} ended, or closed the swarm. Attach again on every rank.")
            raise UsageError(f"{who} {have(missing)} not attached. Call Swarm.attach on every rank.")

    def _check(self, message: PublishEnd) -> None:
        """Raise `PeerError` unless the blocks received from this rank are those that it sent."""
        hashes = self._publisher.hashes
        if any(first + count > len(hashes) for first, count in message.blocks):
            raise PeerError(f"publish.blocks: beyond {len(hashes)}")
        rows = [hashes[first : first + count] for first, count in message.blocks]
        mine = np.concatenate(rows) if rows else hashes[:0]
        if state_root(self._view.layout.hash, mine) != message.root:
            raise PeerError("publish.root: the blocks received do not add up to the trainer's weights")

    def _whole(self) -> bytes:
        """The part's root. Raises `PeerError` unless the ranks' ranges cover each of its blocks exactly once."""
        runs = sorted(run for ended in self._ended.values() for run in ended.blocks)
        at = 0
        for first, count in runs:
            at = at + count if first == at else math.inf
        if at != len(self._publisher.hashes):
            raise PeerError("publish.blocks: the ranks' shares are not the whole model, each block once")
        return state_root(self._view.layout.hash, self._publisher.hashes)

    async def _tell(self, message: msgspec.Struct) -> None:
        """Send to all ranks, to rank 0 last: it may have started this seed, and may end it on this message."""
        for _, channel in sorted(self._members.items(), reverse=True):
            await _try(channel, message)


class RankGroups:
    """The attached trainers, by session."""

    def __init__(self, publisher: Publisher, turns: Turns) -> None:
        self._publisher, self._turns = publisher, turns
        self._rank_groups: dict[bytes, RankGroup] = {}

    def join(self, attach: Attach, part: Part, channel: AsyncChannel) -> RankGroup:
        """`part`: that the trainer publishes. Raises `PeerError` for an impossible rank or world size, and for a part
        that the model does not have."""
        if attach.rank >= attach.world:
            raise PeerError(f"attach.rank: {attach.rank} of {attach.world}")
        rank_group = self._rank_groups.get(attach.session)
        if rank_group is None:
            rank_group = RankGroup(self._publisher, self._turns, attach.world, part)
            self._rank_groups[attach.session] = rank_group
        if (rank_group.world, rank_group.part) != (attach.world, part):
            raise PeerError(
                f"attach: {part} of {attach.world} ranks, and another rank said {rank_group.part} of {rank_group.world}"
            )
        rank_group.join(attach.rank, channel)
        return rank_group

    async def leave(self, rank_group: RankGroup, attach: Attach, channel: AsyncChannel, why: SwarmError | None) -> None:
        """See `RankGroup.leave`."""
        await rank_group.leave(attach.rank, channel, why)
        if not rank_group and self._rank_groups.get(attach.session) is rank_group:
            del self._rank_groups[attach.session]


async def _try(channel: AsyncChannel, message: msgspec.Struct) -> None:
    """Send, unless the peer hung up; the task that reads from the channel finds that out."""
    with contextlib.suppress(ChannelClosed):
        await channel.send(message)
