"""Coverage-guided fuzzing of the transport's readers of strangers' bytes, with atheris (libFuzzer).

    python -m scenarios.fuzz.yamux --seconds 60 [--seed 1] [--corpus DIR]

The first byte of an input selects yamux frames, multistream as the listener, or a whole yamux connection whose peer
sends the input. Frames must parse equally in pieces of any size, and the parser must hold no payload. A connection must
hold no more than its windows allow, must not block forever, and must end cleanly. Any exception but `PeerError` ends
the run with a stack trace and the input.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import trio
import trio.testing

from codec.errors import PeerError
from scenarios.fuzz.libfuzzer import fuzz

__all__ = ["main", "one"]

_MAX_FRAME_BYTES: Final = 1 << 20
_PIECES: Final = (1, 3, 11, 12, 13, 500)
_STREAMS: Final = 8
_BUDGET_BYTES: Final = 1 << 20
_HELD_BYTES: Final = _STREAMS * 262_144 + _BUDGET_BYTES


def one(data: bytes) -> None:
    """Give an input to the reader that its first byte selects."""
    if data:
        (_frames, _negotiation, _connection)[data[0] % 3](data[1:])


def _frames(data: bytes) -> None:
    from swarm.transport.yamux.frames import HEADER_BYTES, FrameParser, Head

    def parse(size: int) -> list[Any]:
        parser, found = FrameParser(_MAX_FRAME_BYTES), list[Any]()
        try:
            for start in range(0, len(data), size):
                for event in parser.feed(data[start : start + size]):
                    if isinstance(event, Head):
                        found.append([event, b""])
                    else:
                        found[-1][1] += event
        except PeerError as error:
            found.append(str(error))
        assert len(parser._partial) <= HEADER_BYTES
        return found

    whole = parse(max(1, len(data)))
    for size in _PIECES:
        assert parse(size) == whole, f"pieces of {size} bytes parse to another result"


class _Script:
    """A channel that delivers the given bytes as they are read. `written`: bytes written to it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.written = 0

    async def read(self, n: int | None = None, /) -> bytes:
        received, self._data = self._data[:n], self._data[n:]
        return received

    async def write(self, data: bytes, /) -> None:
        self.written += len(data)


def _negotiation(data: bytes) -> None:
    from swarm.transport.connection.multistream import answer

    channel = _Script(data)
    with contextlib.suppress(StopIteration, PeerError):
        answer(channel, ["/a/1", "/b/1"]).send(None)
    assert channel.written < 4096, "a stranger's input causes too much output"


def _connection(data: bytes) -> None:
    trio.run(_meet, data, clock=trio.testing.MockClock(autojump_threshold=0))


async def _meet(data: bytes) -> None:
    from swarm.transport.yamux import Connection, StreamLink, YamuxLimits

    near, far = trio.testing.memory_stream_pair()
    limits = YamuxLimits(max_inbound_streams=_STREAMS, window_budget_bytes=_BUDGET_BYTES, accept_backlog=_STREAMS)
    connection = Connection(StreamLink(near), client=False, limits=limits)
    with trio.fail_after(3600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(connection.run)
            mine = await connection.open()
            nursery.start_soon(_ignore, mine.send_all, bytes(300_000))
            try:
                await far.send_all(data)
                await trio.testing.wait_all_tasks_blocked()
                assert connection.unread_bytes <= _HELD_BYTES + limits.first_window_bytes
                # Reset streams count too: the application may accept and read them later.
                counted = set(connection._streams.values())
                holding = {stream for stream in {*counted, *connection._accepted} if stream._unread}
                assert sum(len(piece) for stream in holding for piece in stream._unread) <= len(data)
                assert connection.closed or holding <= counted
                assert connection.stream_count <= _STREAMS + 1
                await far.aclose()
            except trio.BrokenResourceError:
                pass
        assert connection.closed


async def _ignore(send: Any, data: bytes) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await send(data)


def _corpus(folder: Path) -> None:
    """Write valid inputs to start from."""
    from swarm.transport.connection.multistream import HEADER, encode
    from swarm.transport.yamux.frames import ACK, FIN, RST, SYN, Kind, encode_head

    def data(stream_id: int, payload: bytes, flags: int = 0) -> bytes:
        return encode_head(Kind.DATA, flags, stream_id, len(payload)) + payload

    talk = (
        encode_head(Kind.WINDOW, SYN, 1, 1000)
        + data(1, b"hello" * 20)
        + encode_head(Kind.WINDOW, ACK, 2, 262_144)
        + encode_head(Kind.PING, SYN, 0, 7)
        + encode_head(Kind.PING, ACK, 0, 1)
        + data(3, b"x", SYN | FIN)
        + data(1, b"", FIN)
        + data(3, b"", RST)
        + encode_head(Kind.GO_AWAY, 0, 0, 0)
    )
    for kind in (0, 2):
        (folder / f"frames{kind}").write_bytes(bytes([kind]) + talk)
    (folder / "negotiation").write_bytes(b"\x01" + encode(HEADER, "ls", "/x/1", "/b/1"))


def _load() -> tuple[Callable[[bytes], None], Callable[[Path], None]]:
    import swarm.transport.connection.multistream
    import swarm.transport.yamux  # noqa: F401

    return one, _corpus


def main() -> int:
    return fuzz(__doc__, ["swarm.transport.yamux", "swarm.transport.connection.multistream"], _load)


if __name__ == "__main__":
    sys.exit(main())
