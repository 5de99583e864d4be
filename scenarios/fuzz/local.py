"""The local sockets: kinds of their messages, and a connection that says what it was given."""

import struct
from collections.abc import Sequence
from typing import Any, Final, get_args

import msgspec
import trio

from node.ipc.channel import ChannelClosed
from node.ipc.framing import FrameReader, encode_frame
from scenarios.fuzz.fields import Kind, fields_of
from scenarios.fuzz.samples import sample_of

__all__ = ["ScriptedChannel", "frame", "local_kinds"]

_HEAD: Final = struct.Struct("<IB")


def frame(body: bytes) -> bytes:
    """A body as it travels, without descriptors."""
    return _HEAD.pack(len(body), 0) + body


def local_kinds(union: Any, samples: dict[type, Any] | None = None) -> list[Kind]:
    """Every message of a union. `samples`: plain values of those that their types alone do not make valid."""
    found = samples or {}
    return [_kind(cls, found.get(cls) or sample_of(cls)) for cls in get_args(union)]


def _kind(cls: type, sample: Any) -> Kind:
    def fresh(world: Any) -> Any:
        value = msgspec.msgpack.decode(msgspec.msgpack.encode(sample))
        return world.fitting(cls, value) if hasattr(world, "fitting") else value

    return Kind(cls.__name__, fields_of(cls, sample), fresh, lambda world, body: body)


class ScriptedChannel:
    """In the place of `node.ipc.async_channel.AsyncChannel`: says what it was given, through the real reader of frames,
    and hangs up. What it is sent is packed, as it would be, and forgotten."""

    def __init__(self, receives: Any, frames: Sequence[bytes]) -> None:
        self._frames = FrameReader(receives)
        self._left = list(frames)
        self.sent: list[msgspec.Struct] = []

    async def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        await trio.lowlevel.checkpoint()
        encode_frame(message, fds)
        self.sent.append(message)

    async def recv(self) -> tuple[Any, list[int]]:
        for _ in range(3):  # whoever was told something may do it first
            await trio.lowlevel.checkpoint()
        while (found := self._frames.next_message()) is None:
            if not self._left:
                raise ChannelClosed("the other process is gone")
            self._frames.feed(self._left.pop(0), (), 0)
        return found

    def close(self) -> None:
        self._frames.close()
