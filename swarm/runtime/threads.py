"""How blocking work leaves the event loop."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

__all__ = ["RunSync", "in_thread"]

RunSync = Callable[..., Awaitable[Any]]
"""`await run_sync(function, *arguments)` returns what `function(*arguments)` returns."""

in_thread: RunSync = trio.to_thread.run_sync
