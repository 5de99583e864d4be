"""Kinds of the messages on local sockets, and a scripted channel that delivers given frames."""

import struct
from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec
import trio

from node.ipc.channel import ChannelClosed
from node.ipc.framing import FrameReader, encode_frame
from scenarios.fuzz.inputs.fields import Kind, fields_of
from scenarios.fuzz.inputs.samples import sample_of

__all__ = ["ScriptedChannel", "frame", "local_kinds"]

_HEAD: Final = struct.Struct("<IB")


def frame(body: bytes) -> bytes:
    """Return the frame of a body, without descriptors."""
    return _HEAD.pack(len(body), 0) + body


def local_kinds(union: Any, samples: dict[type, Any] | None = None) -> list[Kind]:
    """Return a kind for every message of a union. `samples`: valid plain values where the type alone gives none."""
    found = samples or {}
    return [_kind(cls, found.get(cls) or sample_of(cls)) for cls in get_args(union)]


def _kind(cls: type, sample: Any) -> Kind:
    def fresh(world: Any) -> Any:
        value = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
        return world.fitting(cls, value) if hasattr(world, "fitting") else value

    return Kind(cls.__name__, fields_of(cls, sample), fresh, lambda world, body: body)


class ScriptedChannel:
    """Replaces `node.ipc.async_channel.AsyncChannel`.

    It delivers the given frames through the real frame reader and then hangs up. Messages sent to it are encoded, as in
    the real channel, and kept in `sent`.
    """

    def __init__(self, receives: Any, frames: Sequence[bytes]) -> None:
        self._frames = FrameReader(receives)
        self._left = list(frames)
        self.sent: list[msgspec.Struct] = []
        self.pid = 0

    async def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        await trio.lowlevel.checkpoint()
        encode_frame(message, fds)
        self.sent.append(message)

    async def recv(self) -> tuple[Any, list[int]]:
        for _ in range(3):  # let other tasks react to earlier messages first
            await trio.lowlevel.checkpoint()
        while (found := self._frames.next_message()) is None:
            if not self._left:
                raise ChannelClosed("the other process is gone")
            self._frames.feed(self._left.pop(0), (), 0)
        return found

    def close(self) -> None:
        self._frames.close()
