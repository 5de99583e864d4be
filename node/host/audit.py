"""Hashes in the background what a start did not, reports damaged blocks, and watches the user's folder.

A store may refer to the user's folder instead of copying the base model. While a process runs it has the bits, in
memory or by hash from its peers; so when the folder changes, it writes a checkpoint of its own at once.
"""

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import structlog
import trio

from codec.errors import UsageError
from swarm.runtime import in_thread

if TYPE_CHECKING:
    from swarm.runtime.replica.model import Model

__all__ = ["audit", "close"]

_log = structlog.get_logger(__name__)
_AUDIT_BYTES_S: Final = 1e9
"""Bytes hashed a second: a tenth of one core, and 16 seconds for an 8B model. A block that a peer requests meanwhile is
hashed when it is read."""
_WATCH_BASE_S: Final = 10.0
"""A look costs a `stat` of each file. When the folder is changed and the process is killed within this time, its next
start needs the folder's old bits."""
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
        nursery.start_soon(_watch_base, model)
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


async def _watch_base(model: "Model") -> None:
    while True:
        await trio.sleep(_WATCH_BASE_S)
        try:
            folder = await in_thread(model.replace_changed_base)
        except UsageError as error:  # a full disk: the bits in memory may be the only ones, so go on and try again
            _log.error("base_changed", error=str(error))
            continue
        if folder is not None:
            _log.warning(
                "base_changed",
                folder=str(folder),
                hint="files in it were changed or removed: this machine now keeps its own copy of the model",
            )


async def close(model: "Model") -> None:
    """Note on disk that the replica is proven, also when cancelled; takes at most `_CLOSE_S`."""
    with trio.move_on_after(_CLOSE_S, shield=True):
        await trio.to_thread.run_sync(model.close, abandon_on_cancel=True)
