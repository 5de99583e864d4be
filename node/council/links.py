"""The streams between the machines of a council.

Each machine dials each other one and sends its messages over a stream of its own; a file has a stream to itself, so
that it delays no message. A message that cannot be sent at once is lost: the core sends again what matters.
"""

import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from struct import Struct
from typing import Final

import trio

from codec.errors import PeerError
from codec.sign import Key
from node.settings.council import CouncilAddress
from swarm.guard import Source, guarded
from swarm.protocol.council.messages import (
    MAX_MESSAGE_BYTES,
    CouncilMessage,
    KeptHead,
    Position,
    SnapshotHead,
    decode,
    encode,
)
from swarm.runtime.framing import ByteReader, Patience, read_frame
from swarm.transport.base import Lane, Stream
from swarm.transport.dialer import DialRules
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import PeerPolicy, TransportRules

__all__ = ["CouncilLinks", "FileCame", "FileHead", "HeardMessage", "snapshot_head"]

HeardMessage = Callable[[bytes, CouncilMessage], Awaitable[None]]
"""`heard(peer, message)`; while it waits, nothing more is read of that peer."""
FileHead = SnapshotHead | KeptHead
"""What a stream begins with that carries a file."""
FileCame = Callable[[bytes, FileHead, Path], Awaitable[None]]
"""`came(peer, head, file)`: its bytes are in `file`, which is the receiver's from now on."""

_LENGTH: Final = Struct("<I")
_QUEUED: Final = 64
"""Messages that wait for a peer."""
_SEND_WITHIN_S: Final = 20.0
_FRAME_WITHIN_S: Final = 60.0
_AGAIN_S: Final = 0.25
"""Pause after a machine could not be reached."""
_PART_BYTES: Final = 1 << 20
_STALLED_S: Final = 30.0
"""A file of which nothing moves for so long is given up."""


class CouncilLinks:
    """The links of one machine. `run` serves them; `send` and `send_file` work while it runs."""

    def __init__(
        self,
        key: Key,
        machines: Mapping[bytes, CouncilAddress],
        folder: Path,
        heard: HeardMessage,
        file_came: FileCame,
    ) -> None:
        """`machines`: all of the council, by key. `folder`: where a file is put while it comes."""
        self._machines, self._folder = machines, folder
        self._heard, self._file_came = heard, file_came
        self._others = [peer for peer in machines if peer != key.public]
        self._queues = {peer: trio.open_memory_channel[bytes](_QUEUED) for peer in self._others}
        self._receiving: set[bytes] = set()
        """Peers of which a file is coming."""
        self._received = 0
        self._transport = Libp2pTransport(
            key, (machines[key.public].listen,),
            policy=PeerPolicy(admits=machines.__contains__, knows=machines.__contains__),
            rules=TransportRules(dial=DialRules(backoff_first_s=_AGAIN_S, backoff_most_s=_AGAIN_S)),
        )  # fmt: skip

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Raises `UsageError` when the port is in use."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self._transport.serve, self._accept)
            for peer in self._others:
                nursery.start_soon(self._keep_sending, peer)
            task_status.started()

    def send(self, peer: bytes, message: CouncilMessage) -> None:
        """Queue a message; it is lost if too many wait."""
        with contextlib.suppress(trio.WouldBlock):
            self._queues[peer][0].send_nowait(encode(message))

    async def send_file(self, peer: bytes, head: FileHead, file: Path) -> None:
        """Send a file over a stream of its own. It may be lost."""
        with guarded(Source.STREAM, peer), trio.CancelScope() as scope:
            await self._connect(peer)
            stream = await self._transport.open_stream(peer, Lane.BULK)
            async with stream:
                await _send_frame(stream, encode(head))
                async with await trio.open_file(file, "rb") as source:
                    while part := await source.read(_PART_BYTES):
                        scope.deadline = trio.current_time() + _STALLED_S
                        await stream.send_all(part)
                await stream.send_eof()

    async def _connect(self, peer: bytes) -> None:
        await self._transport.connect(peer, [self._machines[peer].address])

    async def _keep_sending(self, peer: bytes) -> None:
        while True:
            with guarded(Source.STREAM, peer):
                await self._send_until_broken(peer)
            await trio.sleep(_AGAIN_S)

    async def _send_until_broken(self, peer: bytes) -> None:
        with trio.fail_after(_SEND_WITHIN_S):
            await self._connect(peer)
            stream = await self._transport.open_stream(peer, Lane.CONTROL)
        waiting = self._queues[peer][1]
        with contextlib.suppress(trio.WouldBlock):
            while True:  # what has waited meanwhile is old
                waiting.receive_nowait()
        async with stream:
            async for data in waiting:
                with trio.fail_after(_SEND_WITHIN_S):
                    await _send_frame(stream, data)

    # ------------------------------------------------------------ receiving

    async def _accept(self, peer: bytes, lane: Lane, stream: Stream) -> None:
        if peer not in self._others:
            raise PeerError("not a machine of this council")
        if lane is Lane.BULK:
            await self._receive_file(peer, stream)
            return
        reader, patience = ByteReader(stream), Patience(_FRAME_WITHIN_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(patience.watch)
            while (data := await read_frame(reader, patience, lambda: MAX_MESSAGE_BYTES)) is not None:
                await self._heard(peer, decode(data))
            nursery.cancel_scope.cancel()

    async def _receive_file(self, peer: bytes, stream: Stream) -> None:
        if peer in self._receiving:
            raise PeerError("file: another one is coming")
        self._receiving.add(peer)
        self._received += 1
        file = self._folder / f"council.{self._received}.coming"
        try:
            reader, patience = ByteReader(stream), Patience(_FRAME_WITHIN_S)
            with trio.fail_after(_STALLED_S):
                data = await read_frame(reader, patience, lambda: MAX_MESSAGE_BYTES)
            head = None if data is None else decode(data)
            if not isinstance(head, SnapshotHead | KeptHead):
                raise PeerError("file: it does not begin with its head")
            await self._write(reader, head.size, file)
            await self._file_came(peer, head, file)
        except BaseException:
            file.unlink(missing_ok=True)
            raise
        finally:
            self._receiving.discard(peer)

    @staticmethod
    async def _write(reader: ByteReader, size: int, file: Path) -> None:
        async with await trio.open_file(file, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
            left = size
            while left:
                with trio.fail_after(_STALLED_S):
                    part = await reader.exactly(min(left, _PART_BYTES))
                await out.write(part)
                left -= len(part)


async def _send_frame(stream: Stream, data: bytes) -> None:
    await stream.send_all(_LENGTH.pack(len(data)) + data)


def snapshot_head(term: int, last: Position, file: Path) -> SnapshotHead:
    """The head of the snapshot in `file`."""
    return SnapshotHead(term, last, file.stat().st_size)
