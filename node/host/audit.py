"""Hashes in the background what a start did not, and reports damaged blocks."""

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
"""Bytes hashed a second: a tenth of one core, and 16 seconds for an 8B model. A block that a peer requests meanwhile is
hashed when it is read."""
_CLOSE_S: Final = 10.0
"""Spot machines are announced only shortly before they are taken away."""


async def audit(model: "Model", damaged: Callable[[int], Awaitable[None]]) -> None:
    """Audit `model` until cancelled. `damaged(blocks)` is called with the number of damaged blocks, whenever some are
    found; they have been marked and are given to no peer."""
    token = trio.lowlevel.current_trio_token()
    found, damage = trio.open_memory_channel[int](math.inf)
    model.on_damage = lambda blocks: token.run_sync_soon(found.send_nowait, blocks)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_prove_all, model)
        async for blocks in damage:
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
    """Note on disk that the replica is proven, also when cancelled; takes at most `_CLOSE_S`."""
    with trio.move_on_after(_CLOSE_S, shield=True):
        await trio.to_thread.run_sync(model.close, abandon_on_cancel=True)
