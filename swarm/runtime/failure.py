"""The first error that only a person can fix: a port in use, a full disk. It ends the runtime."""

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from codec.errors import UsageError

__all__ = ["Failure"]


class Failure:
    """Collects `UsageError`s of all tasks of one runtime. The first one counts."""

    def __init__(self) -> None:
        self._error: UsageError | None = None
        self._reported = trio.Event()

    def report(self, error: UsageError) -> None:
        """Have the runtime end with `error`, after a member has released its lease."""
        self._error = self._error or error
        self._reported.set()

    async def watch(self, work: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Await `work(*args)`. A `UsageError` is reported, not raised; any other error passes through."""
        try:
            await work(*args)
        except UsageError as error:
            self.report(error)

    async def wait(self) -> UsageError:
        """Wait until an error is reported, and return it."""
        await self._reported.wait()
        assert self._error is not None
        return self._error
