"""Serves an adapter's routes on one address until the process is interrupted."""

import sys
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import trio

from node.http import Handler, serve

__all__ = ["serve_until_interrupted"]


def serve_until_interrupted(
    handler: Handler, at: str, path: str = "", within: AbstractAsyncContextManager[Any] | None = None
) -> int:
    """Serve `at` (HOST:PORT; port 0: any), and print its URL with `path` once it does. Returns the exit code.

    `within`: entered in the event loop before, and left after; a client that the handler uses, for example.
    """
    host, _, port = at.rpartition(":")
    host = host or "127.0.0.1"

    async def run() -> None:
        async with within or nullcontext(), trio.open_nursery() as nursery:
            bound = await nursery.start(serve, handler, host, int(port))
            print(f"http://{host}:{bound}{path}", flush=True)

    code = 0
    try:
        trio.run(run)
    except* KeyboardInterrupt:
        pass
    except* OSError as group:
        print(f"Cannot listen on {at}: {group.exceptions[0]}. Choose another with --at.", file=sys.stderr)
        code = 2
    return code
