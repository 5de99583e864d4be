"""A connection's bytes over one leg after another: a circuit, the circuit that follows it, a socket of one's own.

TLS and the muxer above see one unbroken pipe. A leg ends with its half-close in either direction, and what comes after
is on the next one, so nothing is lost, doubled or put in another order. Both ends have agreed on the next leg before
(see `links`), on the connection itself, by a token that nobody else knows; a wrong splice breaks TLS, and no more.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import trio
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError, IOException

from swarm.transport.base import PathKind
from swarm.transport.connection.tcp import CountedSocket

__all__ = ["ConnectionLink", "DirectLink", "MigratingConnection", "RelayedLink", "lost_is_broken"]

_NEXT_LINK_S: Final = 20.0
"""How long a reader at the end of a leg waits for the next one that it was promised."""
_MAX_READ: Final = 262_144


@contextmanager
def lost_is_broken() -> Iterator[None]:
    """The library's error for a connection that has ended as trio's, which guards know."""
    try:
        yield
    except IOException as error:
        raise trio.BrokenResourceError(str(error)) from error


class ConnectionLink(Protocol):
    """One pipe. `read` gives b"" at its end; all raise `ConnectionClosedError` when it breaks."""

    path_kind: PathKind
    seen_at: str | None
    """Where the peer is seen; None: the relay does not say."""

    async def read(self, n: int) -> bytes: ...

    async def write(self, data: bytes) -> None: ...

    async def send_eof(self) -> None: ...

    def room(self) -> int | None:
        """How many bytes may still be written; None: any."""
        ...

    async def aclose(self) -> None: ...


class DirectLink:
    """A TCP connection."""

    def __init__(self, sock: CountedSocket, path_kind: PathKind, seen_at: str | None) -> None:
        self.path_kind, self.seen_at = path_kind, seen_at
        self._sock = sock

    async def read(self, n: int) -> bytes:
        return await self._sock.read(n)

    async def write(self, data: bytes) -> None:
        await self._sock.write(data)

    async def send_eof(self) -> None:
        await self._sock.send_eof()

    def room(self) -> int | None:
        return None

    async def aclose(self) -> None:
        await self._sock.close()


class RelayedLink:
    """A stream through a relay, which ends it after `limit_bytes` either way, or after `limit_s`; 0: no limit."""

    path_kind = PathKind.CIRCUIT

    def __init__(
        self,
        stream: trio.abc.HalfCloseableStream,
        seen_at: str | None = None,
        *,
        limit_bytes: int = 0,
        limit_s: float = 0.0,
    ) -> None:
        self.seen_at = seen_at
        self._stream = stream
        self._limit_bytes = limit_bytes
        self._worn_at_s = trio.current_time() + 0.7 * limit_s if limit_s else float("inf")
        self._used_bytes = 0  # both ways together: so py-libp2p's relays count, others each way alone
        self._moved = trio.Event()

    async def read(self, n: int) -> bytes:
        try:
            data = await self._stream.receive_some(n)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the circuit broke: {error}") from error
        self._used_bytes += len(data)
        self._note()
        return bytes(data)

    async def write(self, data: bytes) -> None:
        self._used_bytes += len(data)
        self._note()
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the circuit broke: {error}") from error

    async def send_eof(self) -> None:
        try:
            await self._stream.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the circuit broke: {error}") from error

    def room(self) -> int | None:
        # Some relays (go-libp2p's) end a circuit at its last byte, and what comes the other way with it.
        return self._limit_bytes - 1 - self._used_bytes if self._limit_bytes else None

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)

    def _note(self) -> None:
        if self._half_used:
            self._moved.set()

    @property
    def _half_used(self) -> bool:
        return bool(self._limit_bytes) and 2 * self._used_bytes >= self._limit_bytes

    async def worn(self) -> None:
        """Return when it is time for another: at half of its bytes, or at seven tenths of its time."""
        with trio.move_on_at(self._worn_at_s):
            await self._moved.wait()


class MigratingConnection(ReadWriteCloser):
    """The pipe under one connection."""

    congestion_control = ""
    """As of a socket; of a circuit nobody knows it."""

    def __init__(self, link: ConnectionLink, early: bytes = b"") -> None:
        """`early`: what was read from `link` already."""
        self._early = early
        self.link = link
        """What is written to now."""
        self.on_closed: Callable[[], None] = _nothing
        self._reading = link
        self._links: deque[ConnectionLink] = deque()  # to be read after the present one has ended
        self._half_over: list[ConnectionLink] = []
        self._next: ConnectionLink | None = None  # to be written to from now on
        self._write_lock = trio.Lock()
        self._changed = trio.Event()
        self._promised_until_s = float("-inf")
        self.closed = False

    @property
    def path_kind(self) -> PathKind:
        return self.link.path_kind

    def promise(self) -> None:
        """The next leg is under way: the present one's end is not the end of the path."""
        self._promised_until_s = trio.current_time() + _NEXT_LINK_S

    async def continue_on(self, link: ConnectionLink) -> None:
        """What is written from now on goes over `link`; what is read, too, once the present leg has ended."""
        if self.closed:
            await link.aclose()
            return
        self._links.append(link)
        self._next = link
        self._wake()
        async with self._write_lock:
            await self._switch()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _switch(self) -> None:
        if self._next is not None:
            old, self.link, self._next = self.link, self._next, None
            await old.send_eof()
            await self._finished(old)

    async def read(self, n: int | None = None) -> bytes:
        if self._early:
            data, self._early = self._early, b""
            return data
        while True:
            data = await self._reading.read(_MAX_READ if n is None else max(1, min(n, _MAX_READ)))
            if data or not await self._has_next_link():
                return data
            over, self._reading = self._reading, self._links.popleft()
            await self._finished(over)

    async def _finished(self, link: ConnectionLink) -> None:
        """One direction of `link` has ended; after the second it is closed."""
        if link in self._half_over:
            self._half_over.remove(link)
            await link.aclose()
        else:
            self._half_over.append(link)

    async def _has_next_link(self) -> bool:
        with trio.move_on_at(max(self._promised_until_s, trio.current_time())):
            while not self._links and not self.closed and trio.current_time() < self._promised_until_s:
                await self._changed.wait()
        return bool(self._links)

    async def write(self, data: bytes) -> None:
        view = memoryview(data)
        async with self._write_lock:
            while view:
                await self._switch()
                room = self.link.room()
                if room is not None and room <= 0:
                    await self._wait_for_link()
                    continue
                part = view if room is None else view[:room]
                await self.link.write(bytes(part))
                view = view[len(part) :]

    async def _wait_for_link(self) -> None:
        """This leg's bytes are used up. Better to be late than to be cut off in the middle."""
        with trio.move_on_after(_NEXT_LINK_S):
            while self._next is None and not self.closed:
                await self._changed.wait()
        if self._next is None:
            raise ConnectionClosedError("the relay's limit is reached, and there was no other circuit in time")

    async def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._wake()
        try:
            with trio.CancelScope(shield=True):
                for link in {
                    id(link): link for link in (self._reading, self.link, *self._links, *self._half_over)
                }.values():
                    await link.aclose()
        finally:
            self.on_closed()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def _nothing() -> None:
    pass
