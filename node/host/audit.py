"""Prove, beside everything else, what a start took on trust; and pass on what turns out to be damaged."""

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog
import trio

from swarm.runtime import in_thread

if TYPE_CHECKING:
    from swarm.runtime.replica.model import Model

__all__ = ["audit", "close"]

_log = structlog.get_logger(__name__)
_AUDIT_BYTES_S: Final = 1e9
"""A tenth of one core, and 16 seconds for an 8B model. Blocks that somebody wants meanwhile are proven when they are
read."""
_CLOSE_S: Final = 10.0
"""Spot machines are told little before they are taken away."""


async def audit(model: "Model", damaged: Callable[[int], Awaitable[None]]) -> None:
    """Until cancelled. `damaged(blocks)`: so many were found, now or later, that are not what they must be; they have
    been marked, and given to nobody."""
    token = trio.lowlevel.current_trio_token()
    found, news = trio.open_memory_channel[int](math.inf)
    model.on_damage = lambda blocks: token.run_sync_soon(found.send_nowait, blocks)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_prove_all, model)
        async for blocks in news:
            _log.error("replica_damaged", blocks=blocks, hint="this disk may be failing")
            await damaged(blocks)


async def _prove_all(model: "Model") -> None:
    start, done = trio.current_time(), 0
    while hashed := await in_thread(model.audit):
        done += hashed
        await trio.sleep_until(start + done / _AUDIT_BYTES_S)
    if done:
        _log.info("replica_proven", model_bytes=done)


async def close(model: "Model") -> None:
    """Say on disk that all is well, also when cancelled."""
    with trio.move_on_after(_CLOSE_S, shield=True):
        await trio.to_thread.run_sync(model.close, abandon_on_cancel=True)
