"""How blocking work leaves the event loop."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

__all__ = ["RunSync", "here_and_now", "in_thread"]

RunSync = Callable[..., Awaitable[Any]]
"""`await run_sync(function, *arguments)` returns what `function(*arguments)` returns."""

in_thread: RunSync = trio.to_thread.run_sync


async def here_and_now(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` on the event loop. For tests on a mock clock, which would run ahead of any thread."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)
