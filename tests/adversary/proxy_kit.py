"""A TCP proxy in front of a seed that can hold back the data of a connection, like a full queue in the network."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
from stranger_kit import BROKEN, quietly


class Proxy:
    """Forwards each connection to `port`."""

    def __init__(self, port: int) -> None:
        self._to = port
        self.brought: list[int] = []
        """Bytes from the seed on each connection, in the order in which the connections were opened."""
        self.held_back: set[int] = set()
        """Connections that stay open, and on which no more data of the seed is forwarded."""

    async def serve(self, stream: trio.SocketStream) -> None:
        number = len(self.brought)
        self.brought.append(0)
        with quietly(*BROKEN):
            async with await trio.open_tcp_stream("127.0.0.1", self._to) as seed, trio.open_nursery() as nursery:
                nursery.start_soon(self._copy, stream, seed, None, nursery)
                nursery.start_soon(self._copy, seed, stream, number, nursery)

    async def _copy(self, source: Any, sink: Any, number: int | None, nursery: trio.Nursery) -> None:
        with quietly(*BROKEN):
            while data := await source.receive_some(65536):
                if number is not None:
                    while number in self.held_back:  # noqa: ASYNC110
                        await trio.sleep(0.05)
                    self.brought[number] += len(data)
                await sink.send_all(data)
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def proxied(listen: int, port: int) -> AsyncIterator[Proxy]:
    """A proxy at port `listen` for the seed at `port`, while the block runs."""
    proxy = Proxy(port)
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_tcp, proxy.serve, listen)
        yield proxy
        nursery.cancel_scope.cancel()
