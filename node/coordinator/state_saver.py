"""Answers `SaveState`: has the placer code a trainer's file and place it with nodes, and reports how far it is.

Also tells the seed's status which states there are."""

import contextlib
import time
from pathlib import Path
from typing import Final

import trio

from codec.errors import SwarmError, UsageError
from node.ipc.async_channel import AsyncChannel
from node.ipc.channel import ChannelClosed
from node.saved.coding import CodedState
from node.saved.placer import Placer
from node.status.schema import SavedStateStatus
from node.trainers.state_messages import SaveState, StateProgress, StateSaved

__all__ = ["StateSaver"]

REPORT_S: Final = 0.25
"""Interval between two reports."""


class StateSaver:
    """One for a seed; trainers that save at the same time take turns in the placer."""

    def __init__(self, placer: Placer) -> None:
        self._placer = placer

    def status(self) -> list[SavedStateStatus]:
        """The states in the swarm, the last whole one first."""
        now = time.time()
        return [
            SavedStateStatus(
                step=record.step,
                size_bytes=record.size,
                age_s=max(0.0, now - record.serial / 1000),
                whole=record.serial == self._placer.whole,
                fragments=record.total,
                needed=record.needed,
                held=len(holders),
                nodes=len(set(holders)),
            )
            for record, holders in self._placer.states()
        ]

    async def converse(self, channel: AsyncChannel, asked: SaveState) -> None:
        """Save a state, and tell the process at the other end. When it hangs up, what is coded is placed all the same.

        Raises `UsageError` for a file that cannot be saved and without nodes, and `ChannelClosed`.
        """
        path = Path(asked.path)
        if not path.is_absolute():
            raise UsageError("The path of a state must be absolute.")
        progress = StateProgress("coding", 0, 0)

        def tell(stage: str, done: int, total: int) -> None:  # also called in a worker thread
            nonlocal progress
            progress = StateProgress("coding" if stage == "coding" else "placing", done, total)

        async def report() -> None:
            while True:
                await channel.send(progress)
                await trio.sleep(REPORT_S)

        state: CodedState | None = None
        error: SwarmError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_at_hang_up, channel, nursery.cancel_scope)
            nursery.start_soon(report)
            try:
                state = await self._placer.save(path, asked.step, tell)
            except SwarmError as found:  # raised below, alone and not in a group
                error = found
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error
        if state is None:
            raise ChannelClosed("the process that saved a state has ended")
        record = state.record
        nodes = self._placer.addresses
        await channel.send(StateSaved(record.serial, record.size, record.needed, record.total, nodes))


async def _end_at_hang_up(channel: AsyncChannel, scope: trio.CancelScope) -> None:
    with contextlib.suppress(SwarmError):
        await channel.recv()  # the other end says nothing more
    scope.cancel()
