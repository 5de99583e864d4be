"""The front of a gateway and the seed behind it: the messages that each receives from the other.

A message to the seed comes from a front whose client waits; a message to the front answers a client's stream. Invalid
ones end the connection between the two, and no more: a client is answered, and never with 500.
"""

import random
import socket
from typing import Any, ClassVar, Final

import msgspec
import trio
import trio.testing

from codec.errors import PeerError
from node.gateway.admission import Admission
from node.gateway.clients import Clients
from node.gateway.front.backend import Backend
from node.gateway.front.front import Front
from node.gateway.front.messages import Answer, Ask, Delivered, End, Over, Part, Taken, ToFront, ToSeed
from node.gateway.progress import Began, Ended, Sent, note_of
from node.http import HttpLimits, HttpServer
from node.ipc.channel import ChannelClosed
from scenarios.fuzz.inputs.fields import Kind, fields_of, plain
from scenarios.fuzz.inputs.http_kinds import KEY
from scenarios.fuzz.inputs.local import ScriptedChannel, frame
from scenarios.fuzz.target import FOREVER, Broken, Target, World
from scenarios.fuzz.targets.gateway import GatewayWorld, Patient

__all__ = ["FrontTarget"]

_BODY: Final = b'{"prompt":"abc","max_tokens":3,"stream":true,"temperature":0}'
_HEADERS: Final = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
_REQUEST: Final = (
    f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    f"Content-Length: {len(_BODY)}\r\n\r\n"
).encode() + _BODY
_BEGAN: Final = Began("ab", 7, 3)
_SENT: Final = Sent(0, b"\1\0\0\0", b"\0\0\0\xbf", b"", [((0, 1), 1)])
_ASK: Final = Ask(1, "POST", "/v1/completions", "", _HEADERS, _BODY, [note_of([_BEGAN]), note_of([_SENT])])
_TO_SEED: Final = {Ask: _ASK, Delivered: Delivered(1, 3), Over: Over(1)}
_TO_FRONT: Final = {
    Taken: Taken(1),
    Answer: Answer(1, 200, "text/event-stream; charset=utf-8", [("Cache-Control", "no-store")], b"{}"),
    Part: Part(1, b"data: {}\n\n", note_of([_SENT])),
    End: End(1, True),
}
_NOTES: Final = {Began: _BEGAN, Sent: _SENT, Ended: Ended()}
_QUIET_S: Final = 5.0
"""Virtual time for an answer."""


class _Waiting(ScriptedChannel):
    """A front that waits for answers before it hangs up."""

    async def recv(self) -> tuple[Any, list[int]]:
        try:
            return await super().recv()
        except ChannelClosed:
            await trio.sleep(_QUIET_S)
            raise


class _World(GatewayWorld):
    def give(self, kind: Kind, data: bytes) -> str:
        clock = trio.testing.MockClock(autojump_threshold=0)
        if kind.name in {cls.__name__ for cls in _TO_FRONT}:
            return trio.run(self._answer_client, kind.name, data, clock=clock)
        return trio.run(self._ask_seed, kind.name, data, clock=clock)

    async def _ask_seed(self, name: str, data: bytes) -> str:
        before: list[Ask | Delivered | Over] = [_ASK] if name in ("Delivered", "Over") else []
        frames = [frame(msgspec.msgpack.encode(ToSeed(before)))] if before else []
        channel = _Waiting(ToSeed, [*frames, frame(data)])
        admission = Admission(Clients(None, KEY))
        refused = ""
        try:
            await Backend(channel, self.app(admission), admission.check).run()  # type: ignore[arg-type]
        except* PeerError as errors:  # the seed ends this gateway
            refused = str(errors.exceptions[0])
        finally:
            channel.close()
        if refused:
            return refused
        sent = [message for each in channel.sent for message in each.messages]  # type: ignore[attr-defined]
        if any(isinstance(message, Answer) and message.status == 500 for message in sent):
            raise Broken(f"the seed answered 500 to {data[:300]!r}")
        return " ".join(type(message).__name__ for message in sent[-3:]) or "nothing"

    async def _answer_client(self, name: str, data: bytes) -> str:
        begin = Answer(1, 200, "text/event-stream", [])
        first = [] if name == "Answer" else [frame(msgspec.msgpack.encode(ToFront([begin])))]
        client, front = Patient(_REQUEST, 1), Front(away_s=_QUIET_S)
        ours, theirs = socket.socketpair()
        with theirs:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(front.serve_seed, ours)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(HttpServer(front, HttpLimits(), lambda head: None).serve_connection, client)
                await trio.sleep(_QUIET_S)
                theirs.sendall(b"".join([*first, frame(data)]))
                await trio.sleep(_QUIET_S)
                theirs.close()  # a client that waits is told after `away_s`
        return self.outcome(client, data)


def _enclosed(tag: str, body: bytes) -> bytes:
    return msgspec.msgpack.encode({"type": tag, "messages": [msgspec.Raw(body)]})


def _message_kind(cls: type, sample: Any, tag: str) -> Kind:
    return Kind(
        cls.__name__,
        fields_of(cls, plain(sample)),
        lambda world: plain(sample),
        lambda world, body: _enclosed(tag, body),
    )


def _note_kind(cls: type, sample: Any) -> Kind:
    def enclose(world: Any, body: bytes) -> bytes:
        note = msgspec.msgpack.encode([msgspec.Raw(body)])
        asked = msgspec.structs.replace(_ASK, before=[note_of([_BEGAN]), note])
        return msgspec.msgpack.encode(ToSeed([asked]))

    return Kind(f"note/{cls.__name__}", fields_of(cls, plain(sample)), lambda world: plain(sample), enclose)


class FrontTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "front"
    about: ClassVar[str] = "the socket between a gateway's front and the seed: requests, notes and answers"
    episode: ClassVar[int] = FOREVER

    def __init__(self) -> None:
        self.kinds = [
            *(_message_kind(cls, sample, "to_seed") for cls, sample in _TO_SEED.items()),
            *(_message_kind(cls, sample, "to_front") for cls, sample in _TO_FRONT.items()),
            *(_note_kind(cls, sample) for cls, sample in _NOTES.items()),
        ]

    def world(self, rng: random.Random) -> World:
        return _World(rng)

    def types(self) -> dict[str, Any]:
        named = {cls.__name__: cls for cls in (*_TO_SEED, *_TO_FRONT)}
        return named | {f"note/{cls.__name__}": cls for cls in _NOTES}
