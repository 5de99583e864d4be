"""The engine's memory as the node's replica (`--replica engine`): read back, proven, and repaired.

The replica itself is on disk (`codec.Layered`), from where an engine is filled. What is read of it afterwards, to
decode the next version, to serve a peer or to write a checkpoint, is read back out of an engine and compared with the
block's hash; the disk is read only where no engine has the bits. If an engine that is at the replica's version has
other bits, it proves all of its bits, and is filled again if they are wrong.
"""

import threading
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
import structlog
import trio

from codec import shared
from codec.bits import Bits
from node.engines.group import EngineGroup
from node.engines.host import EngineFailed, EngineHost, EngineLost
from node.engines.messages import MAX_BLOCKS
from node.engines.window import WINDOW_BYTES, places
from node.status.schema import LiveReads
from swarm.runtime import in_thread
from swarm.runtime.replica.model import Loan, Model

__all__ = ["EngineMemory"]

_log = structlog.get_logger(__name__)
_PATIENCE_S: Final = 2.0
"""A reader waits this long for other readers of the engine; then it reads the disk."""


class EngineMemory:
    """Implements `codec.live.LiveBlocks` over a node's engines. `run` must be running."""

    def __init__(self, engines: EngineGroup, model: Model) -> None:
        """Raises `UsageError` where there is no memory for the window."""
        self._engines, self._model = engines, model
        fd, memory = shared.reserve("swarm-window", WINDOW_BYTES)
        if fd is None:
            raise shared.no_sharing()
        self.window_fd: int = fd
        """The memory into which the engines write blocks."""
        self._window = np.frombuffer(memory, np.uint8)
        self._reading = threading.Lock()
        self._token: trio.lowlevel.TrioToken | None = None
        self._turn = 0
        self._loans = trio.Lock()
        self._lent, self._suspected = trio.Event(), trio.Event()
        self.reads = LiveReads()

    async def run(self) -> None:
        """Let the replica read from the engines, until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        self._model.read_live(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_loans)
                nursery.start_soon(self._repair)
        finally:
            self._token = None
            self._model.read_live(None)

    # ------------------------------------------------------------ in a thread of the replica's

    def read(self, blocks: Sequence[int]) -> list[Bits]:
        """See `LiveBlocks`."""
        layout, token = self._model.layout, self._token
        if layout is None or token is None or not self._reading.acquire(timeout=_PATIENCE_S):
            return []
        try:
            host = self._next_host()
            if host is None:
                return []
            wanted = list(places(layout, islice(blocks, MAX_BLOCKS)))
            numbers = [place.block for place in wanted]
            trio.from_thread.run(host.read_blocks, numbers, trio_token=token)
            return [place.view(self._window).copy() for place in wanted]
        except (EngineLost, EngineFailed, trio.RunFinishedError, trio.Cancelled):
            return []
        finally:
            self._reading.release()

    def _next_host(self) -> EngineHost | None:
        """The engines take turns, so that each is compared with the replica."""
        ready = [host for host in self._engines.hosts if host.ready]
        self._turn += 1
        return ready[self._turn % len(ready)] if ready else None

    def count(self, *, right: bool) -> None:
        """See `LiveBlocks`."""
        if right:
            self.reads.right += 1
            return
        self.reads.other += 1
        if (token := self._token) is not None:
            token.run_sync_soon(lambda: self._suspected.set())

    # ------------------------------------------------------------ in tasks

    async def lend(self) -> Loan | None:
        """As `Model.lend`. The loan ends when every engine is filled."""
        async with self._loans:
            loan = await in_thread(self._model.lend)
        self._lent.set()
        return loan

    async def _end_loans(self) -> None:
        while True:
            await self._lent.wait()
            self._lent = trio.Event()
            await self._engines.wait_filled()
            async with self._loans:
                if self._engines.filled:  # an engine is not ready while it reads a loan
                    await in_thread(self._model.end_loan)

    async def _repair(self) -> None:
        """When a block had other bits than it must have: the engines prove theirs, and are filled if they are wrong."""
        while True:
            await self._suspected.wait()
            self._suspected = trio.Event()
            held = self._model.version
            if held is None or any(host.version != held for host in self._engines.hosts if host.ready):
                continue  # it may be at an older version that the replica does not know any more
            try:
                _, right = await self._engines.prove()
                if not right:
                    _log.error("engine_damaged", hint="this machine's memory may be failing")
                    await self._engines.reload()
            except (EngineLost, EngineFailed) as error:
                _log.warning("engine_lost", why=str(error))
