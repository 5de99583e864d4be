"""A connection that moves from one link to the next: from a circuit to another circuit, or to a direct socket.

TLS and the muxer above it see one unbroken pipe. Each direction of a link ends with its half-close, and the bytes after
that travel on the next link, so none is lost, doubled or reordered. Both ends agree on the next link beforehand, on the
connection itself, by a token that no other peer knows (`nat.relayed_links`, `nat.punch`). A link that is spliced in by
mistake breaks TLS and does no other harm.
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
"""How long an expected link may take: a reader at the end of a link waits this long, and a writer at its limit."""
_MAX_READ_BYTES: Final = 262_144


@contextmanager
def lost_is_broken() -> Iterator[None]:
    """Turn py-libp2p's error for a lost connection into trio's, which `swarm.guard` expects of peers."""
    try:
        yield
    except IOException as error:
        raise trio.BrokenResourceError(str(error)) from error


class ConnectionLink(Protocol):
    """One pipe under a `MigratingConnection`. `read` returns b"" at its end. Every method but `room` and `aclose`
    raises `ConnectionClosedError` when the pipe breaks."""

    path_kind: PathKind
    seen_at: str | None
    """The peer's address as we or the relay see it (multiaddr text); None if the relay does not say."""

    async def read(self, n: int) -> bytes: ...

    async def write(self, data: bytes) -> None: ...

    async def send_eof(self) -> None: ...

    def room(self) -> int | None:
        """How many more bytes may be written; None: no limit."""
        ...

    async def aclose(self) -> None: ...


class DirectLink:
    """A TCP connection as a link."""

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
    """A circuit as a link. The relay ends it after `limit_bytes` in either direction or after `limit_s`; 0: no
    limit."""

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
        self._used_bytes = 0  # both directions together, as py-libp2p's relays count; other relays count each alone
        self._is_half_used = trio.Event()

    async def read(self, n: int) -> bytes:
        try:
            data = await self._stream.receive_some(n)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise ConnectionClosedError(f"the circuit broke: {error}") from error
        self._count(len(data))
        return bytes(data)

    async def write(self, data: bytes) -> None:
        self._count(len(data))
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
        # Some relays (go-libp2p's) end both directions of a circuit at its last byte, so that byte is never used.
        return self._limit_bytes - 1 - self._used_bytes if self._limit_bytes else None

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)

    def _count(self, length: int) -> None:
        self._used_bytes += length
        if self._limit_bytes and 2 * self._used_bytes >= self._limit_bytes:
            self._is_half_used.set()

    async def wait_worn(self) -> None:
        """Return when the link should be replaced: at half of its bytes, or at seven tenths of its time."""
        with trio.move_on_at(self._worn_at_s):
            await self._is_half_used.wait()


class MigratingConnection(ReadWriteCloser):
    """The pipe under one secured connection."""

    congestion_control = ""
    """As `CountedSocket.congestion_control`; not known for a circuit."""

    def __init__(self, link: ConnectionLink, early: bytes = b"") -> None:
        """`early`: bytes that were read from `link` already."""
        self._early = early
        self.link = link
        """The link that we write to."""
        self.on_closed: Callable[[], None] = _nothing
        """Called once when the connection is closed; set by the transport that serves it."""
        self._reading = link
        self._links: deque[ConnectionLink] = deque()  # to be read after `_reading` has ended
        self._half_closed: list[ConnectionLink] = []  # one direction has ended
        self._next: ConnectionLink | None = None  # the next write switches to it
        self._write_lock = trio.Lock()
        self._changed = trio.Event()
        self._expected_until_s = float("-inf")
        self.closed = False

    @property
    def path_kind(self) -> PathKind:
        return self.link.path_kind

    def expect_link(self) -> None:
        """Another link is being made: for a while, the end of the present one is not the end of the connection."""
        self._expected_until_s = trio.current_time() + _NEXT_LINK_S

    async def continue_on(self, link: ConnectionLink) -> None:
        """Write to `link` from now on, and read from it once the present link has ended. Closes it if the connection
        is closed."""
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
            await self._end_direction(old)

    async def read(self, n: int | None = None) -> bytes:
        if self._early:
            data, self._early = self._early, b""
            return data
        while True:
            data = await self._reading.read(_MAX_READ_BYTES if n is None else max(1, min(n, _MAX_READ_BYTES)))
            if data or not await self._has_next_link():
                return data
            ended, self._reading = self._reading, self._links.popleft()
            await self._end_direction(ended)

    async def _end_direction(self, link: ConnectionLink) -> None:
        """One direction of `link` has ended. Close the link after the second."""
        if link in self._half_closed:
            self._half_closed.remove(link)
            await link.aclose()
        else:
            self._half_closed.append(link)

    async def _has_next_link(self) -> bool:
        """Whether there is another link to read; waits for one that is expected."""
        with trio.move_on_at(max(self._expected_until_s, trio.current_time())):
            while not self._links and not self.closed and trio.current_time() < self._expected_until_s:
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
        """Wait until there is another link: this one's bytes are used up, and more would be cut off in the middle."""
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
                    id(link): link for link in (self._reading, self.link, *self._links, *self._half_closed)
                }.values():
                    await link.aclose()
        finally:
            self.on_closed()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None


def _nothing() -> None:
    pass
