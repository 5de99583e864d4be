"""The interface between the swarm and the network.

A transport identifies peers by their Ed25519 public key (32 bytes), proves the key of the other end, and opens byte
streams. Streams are trio's `HalfCloseableStream` with two more methods (`Stream`), so trio's stream tests apply to
them. Deadlines are the caller's: wrap awaits on a peer in `trio.fail_after`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import trio

from codec.errors import SwarmError
from swarm.guard import Source, guarded

__all__ = [
    "Accept",
    "Lane",
    "OtherProtocol",
    "PathKind",
    "PeerKey",
    "Stream",
    "Traffic",
    "Transport",
    "Unreachable",
    "attend",
]

PeerKey = bytes
"""A peer's raw Ed25519 public key, 32 bytes."""


class Unreachable(SwarmError):
    """No address of this peer answered, or the connection ended; the text says which and why."""


class OtherProtocol(trio.BrokenResourceError):
    """The peer is there, but does not speak this lane's protocol: it runs another version of this program."""

    def __init__(self, protocol: str) -> None:
        super().__init__(
            f"it does not speak {protocol}, so it runs another version of swarm-node: install the same version on both"
        )


class Lane(Enum):
    """What a stream carries. The lanes use different connections, so that control never waits behind bulk."""

    CONTROL = "control"
    BULK = "bulk"


class PathKind(Enum):
    """How a peer is reached; the best kind first."""

    DIALED = "direct"
    """We dialed it."""
    ACCEPTED = "dialed us"
    PUNCHED = "punched"
    """Both ends dialed at once, through their firewalls or NATs."""
    CIRCUIT = "circuit"
    """Through a relay, which sees only ciphertext."""


@dataclass
class Traffic:
    """Bytes that crossed this transport's sockets, counted as TCP payload: after encryption and framing."""

    sent: int = 0
    received: int = 0
    departed: int = 0
    """Bytes of IP packets that closed connections sent (see `Transport.departed_bytes`), so more than TCP payload."""


class Stream(trio.abc.HalfCloseableStream):
    """A transport's stream: trio's, with three methods that save wake-ups of tasks and copies, which cost more than the
    bytes do. A transport that can do none of it keeps these defaults."""

    async def receive_at_least(self, least: int, max_bytes: int | None = None) -> bytes:
        """As `receive_some`, but may sleep until `least` bytes have come, or as many as the stream buffers, or its end.
        It may also return fewer bytes at once, as this default does."""
        return bytes(await self.receive_some(max_bytes))

    async def receive_exactly(self, size: int, first: bytes = b"") -> bytes | memoryview:
        """`first`, which was received before, and what follows it: `size` bytes in one buffer, which is the caller's
        alone. Fewer at the end of the stream. If nothing has to be awaited, other tasks may get no turn. When it is
        cancelled, what it has received is lost, and the stream is of no further use."""
        parts, length = [first], len(first)
        while length < size:
            data = await self.receive_at_least(size - length, size - length)
            if not data:
                break
            parts.append(data)
            length += len(data)
        return b"".join(parts)

    def send_now(self, *parts: bytes | bytearray | memoryview) -> bool:
        """Queue `parts`, one after the other, if that needs no waiting, and return True. False: nothing was sent.

        A read-only view is not copied: what is behind it must not change any more."""
        return False


Accept = Callable[[PeerKey, Lane, Stream], Awaitable[None]]
"""Called in a task of its own for each stream that a peer opens; the stream is closed when it returns.

If it raises `PeerError`, the peer is disconnected. If the stream breaks or is closed, it ends quietly. Any other error
is a bug of ours that this peer has triggered, and the peer is disconnected, too (`swarm.guard`).
"""


class Transport(ABC):
    """Dials and serves peers and opens streams to them. Implementations: `libp2p` (sockets) and `memory` (tests)."""

    key: PeerKey
    """Our own identity."""

    traffic: Traffic

    @abstractmethod
    async def serve(
        self, accept: Accept, *, task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run until cancelled. `started()` gives the listening addresses (multiaddr text, without the peer id).

        Cancelling closes every connection. Raises `UsageError` when a port is in use.
        """

    @abstractmethod
    async def connect(self, peer: PeerKey, addrs: Sequence[str]) -> None:
        """Connect to `peer`; returns at once if there is a connection. Raises `Unreachable`."""

    @abstractmethod
    async def open_stream(self, peer: PeerKey, lane: Lane) -> Stream:
        """Open a stream to a connected peer on the given lane. The transport makes more connections if it needs them.

        Raises `Unreachable`.
        """

    @abstractmethod
    async def disconnect(self, peer: PeerKey) -> None:
        """Close every connection to `peer`; its streams break. Never raises."""

    @abstractmethod
    def remote_address(self, peer: PeerKey) -> str | None:
        """The address at which we see the peer (multiaddr text), or None when it is not connected."""

    @abstractmethod
    async def probe(self, peer: PeerKey, address: str) -> bool:
        """Whether `peer` itself answers at `address`. Dials anew, whatever connections there are. Never raises.

        A transport may replace a circuit to the peer by the connection that it made here.
        """

    @abstractmethod
    def path_kind(self, peer: PeerKey) -> PathKind | None:
        """How the peer is reached; None when it is not connected."""

    @abstractmethod
    def peers(self) -> list[PeerKey]:
        """The peers with a live connection. A peer that falls silent leaves this list after the transport's own
        limit."""

    def departed_bytes(self) -> int | None:
        """Bytes of IP packets that all connections have sent so far, with headers, acknowledgements and
        retransmissions. None where the transport cannot count them."""
        return None

    def target_connections(self, peer: PeerKey) -> int:
        """How many bulk streams together fill the path to `peer`; each gets a connection of its own. 1 on short paths.

        It depends on the measured round trip, so ask when there is something to send. More streams are allowed but gain
        nothing; fewer may leave part of a long path's capacity unused.
        """
        return 1


async def attend(transport: Transport, accept: Accept, peer: PeerKey, lane: Lane, stream: Stream) -> None:
    """Run `accept` on one stream and handle its errors as `Accept` says."""
    with guarded(Source.STREAM, peer) as outcome:
        async with stream:
            await accept(peer, lane, stream)
    if outcome.is_rule_broken:
        await transport.disconnect(peer)
