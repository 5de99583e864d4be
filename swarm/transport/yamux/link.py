"""The pipe under a yamux connection, and adapters to it."""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import trio

__all__ = ["ByteLink", "Closer", "Offer", "StreamLink"]

_READ_BYTES: Final = 262_144

Offer = Callable[[Sequence[bytes | memoryview]], bool]
"""Called with the parts to write, not while `send` runs. True: they have left. False: some have not, or the pipe is
broken: `send` has to be awaited next."""


class ByteLink(Protocol):
    """The pipe that a connection runs on: an ordered byte stream, already secured."""

    async def receive(self) -> bytes | memoryview:
        """The bytes that have arrived, or b"" at the end. A view is valid until the caller next awaits."""
        ...

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write what `offer` left, then `parts`."""
        ...

    @property
    def offer(self) -> "Offer | None":
        """Writes parts without waiting; None when this link cannot."""
        ...

    async def aclose(self) -> None: ...


class StreamLink:
    """A trio stream as a `ByteLink`."""

    offer = None

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream

    async def receive(self) -> bytes:
        return bytes(await self._stream.receive_some(_READ_BYTES))

    async def send(self, parts: Sequence[bytes | memoryview]) -> None:
        await self._stream.send_all(b"".join(parts))

    async def aclose(self) -> None:
        await self._stream.aclose()


class Closer(trio.abc.AsyncResource):
    """A link as trio's `AsyncResource`, for `trio.aclose_forcefully`."""

    def __init__(self, link: ByteLink) -> None:
        self._link = link

    async def aclose(self) -> None:
        await self._link.aclose()
