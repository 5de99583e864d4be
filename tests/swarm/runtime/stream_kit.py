"""trio's test streams as `Stream`s of a transport, without `send_now` or with one that the test controls."""

import trio
import trio.testing

from swarm.transport.base import Stream


class Plain(Stream):
    """One end of a pair."""

    def __init__(self, stream: trio.StapledStream) -> None:
        self._stream = stream

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._stream.receive_some(max_bytes))

    async def aclose(self) -> None:
        await self._stream.aclose()


class Taking(Plain):
    """A stream that takes what is sent at once while `is_open`, and remembers it."""

    def __init__(self, stream: trio.StapledStream) -> None:
        super().__init__(stream)
        self.is_open = True
        self.taken: list[bytes] = []

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        if self.is_open:
            self.taken.append(b"".join(parts))
        return self.is_open


def taking() -> Taking:
    return Taking(trio.testing.memory_stream_pair()[0])


def memory_pair() -> tuple[Plain, Plain]:
    """A pair that buffers what is sent until it is read."""
    near, far = trio.testing.memory_stream_pair()
    return Plain(near), Plain(far)


def lockstep_pair() -> tuple[Plain, Plain]:
    """A pair whose sender waits until everything has been read."""
    near, far = trio.testing.lockstep_stream_pair()
    return Plain(near), Plain(far)
