"""The engines of a node that holds a format: filled from the base that the codes stand for, and updated with it."""

from collections.abc import Sequence
from pathlib import Path

import trio

from codec import StagedChunk
from codec.patch import write_patch
from node.engines.group import EngineGroup
from swarm.protocol.core.events import VersionId
from swarm.runtime import in_thread
from swarm.runtime.replica.dequantised import DequantisedReplica
from swarm.runtime.replica.files import Loan

__all__ = ["FormatEngine"]


class FormatEngine:
    """Lends the bits, and ends the loan when every engine is filled."""

    def __init__(self, engines: EngineGroup, replica: DequantisedReplica) -> None:
        self._engines, self._replica = engines, replica
        self._using = trio.Lock()
        self._lent = trio.Event()

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            await self._lent.wait()
            self._lent = trio.Event()
            await self._engines.wait_filled()
            async with self._using:
                if self._engines.filled:  # an engine is not ready while it reads a loan
                    await in_thread(self._replica.end_loan)

    async def lend(self) -> Loan | None:
        """The bits for an engine to map; None while the replica is of no version."""
        async with self._using:
            loan = await in_thread(self._replica.lend)
        self._lent.set()
        return loan

    async def write_files(self, folder: Path) -> None:
        """Write the small files that the engines need in place of the model's, once bits were lent."""
        for name, data in self._replica.files.items():
            await in_thread((folder / name).write_bytes, data)

    async def patch(self, version: VersionId, staged: Sequence[StagedChunk]) -> tuple[int, bytes] | None:
        """(a patch with what a version changes in the engines, the root of their bits afterwards); None: not known, so
        they have to be filled again."""
        async with self._using:
            found = await in_thread(self._replica.changes, version, staged)
        if found is None:
            return None
        descriptor, _ = await in_thread(write_patch, found.changes, self._replica.layout)
        return descriptor, found.root
