"""Transport input from strangers: certificates, hole-punching meetings, circuits, multistream, peer ids.

Yamux has its own fuzzer: `scenarios.fuzz.yamux`.
"""

import random
from collections.abc import Coroutine
from typing import Any, ClassVar, Final

import msgspec
from libp2p.security.exceptions import HandshakeFailure

from codec.errors import PeerError
from scenarios.fuzz.inputs.binary import _uint, fields_of_values
from scenarios.fuzz.inputs.certificates import certificate_kind
from scenarios.fuzz.inputs.fields import Kind, fields_of, plain
from scenarios.fuzz.inputs.scene import key_of
from scenarios.fuzz.target import FOREVER, Target, World
from swarm.transport.connection import multistream
from swarm.transport.connection.addresses import host_and_port_of
from swarm.transport.connection.certificate import verified_key
from swarm.transport.connection.tcp import TOKEN_BYTES
from swarm.transport.identity import peer_id, peer_key
from swarm.transport.nat import circuit, punch

__all__ = ["TransportTarget"]

_ID: Final = peer_id(key_of("peer").public)
_ID_BYTES: Final = bytes.fromhex("002408011220") + key_of("peer").public
_ADDRESS: Final = bytes.fromhex("04c6336407060fa1")
"""/ip4/198.51.100.7/tcp/4001"""


class _Script:
    """A stream that delivers the given bytes and ends. `said`: bytes written to it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.said = 0

    async def receive_some(self, most: int | None = None) -> bytes:
        received, self._data = self._data[:most], self._data[most:] if most is not None else b""
        return received

    async def send_all(self, data: bytes) -> None:
        self.said += len(data)

    async def read(self, n: int | None = None, /) -> bytes:
        return await self.receive_some(n)

    async def write(self, data: bytes, /) -> None:
        self.said += len(data)


def _run(task: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end. It must never wait, since all input is available."""
    try:
        task.send(None)
    except StopIteration as end:
        return end.value
    task.close()
    raise AssertionError("it waits though the stream has ended")


def meeting_kind() -> Kind:
    """Return the kind of the message in which an end of a circuit announces where it dials from."""
    sample = punch._Meeting(bytes(TOKEN_BYTES), ("/ip4/198.51.100.7/tcp/4001",))
    return Kind(
        "meeting",
        fields_of(punch._Meeting, plain(sample), "Meeting"),
        lambda world: plain(sample),
        lambda world, body: (len(body) & 0xFFFF).to_bytes(2, "little") + body,
    )


# ---------------------------------------------------------------- protobuf, written by hand

_HOP_NAMES: Final = ["type", "peer id", "peer address", "expire", "relay address", "voucher", "duration", "data",
                     "status", "unknown"]  # fmt: skip


def _hop_values(world: Any) -> list[Any]:
    return [0, _ID_BYTES, _ADDRESS, 1 << 31, _ADDRESS, b"voucher", 60, 1 << 17, 100, b""]


def _number(tag: int, value: Any) -> bytes:
    return _uint(tag << 3) + (_uint(value & ((1 << 64) - 1)) if isinstance(value, int) else bytes(value))


def _bytes(tag: int, value: Any) -> bytes:
    body = value if isinstance(value, bytes) else bytes(value) if isinstance(value, msgspec.Raw) else b"\xff"
    return _uint(tag << 3 | 2) + _uint(len(body)) + body


def _hop(values: list[Any]) -> bytes:
    """Encode a hop message. A stop message has the same fields without the reservation."""
    kind, id_, address, expire, relay, voucher, duration, data, status, unknown = (values + [b""] * 10)[:10]
    peer = _bytes(1, id_) + _bytes(2, address)
    reservation = _number(1, expire) + _bytes(2, relay) + _bytes(3, voucher)
    limit = _number(1, duration) + _number(2, data)
    return (
        _number(1, kind) + _bytes(2, peer) + _bytes(3, reservation) + _bytes(4, limit) + _number(5, status)
        + (_bytes(9, unknown) if unknown else b"")
    )  # fmt: skip


def _stop(values: list[Any]) -> bytes:
    kind, id_, address, _, _, _, duration, data, status, unknown = (values + [b""] * 10)[:10]
    peer = _bytes(1, id_) + _bytes(2, address)
    limit = _number(1, duration) + _number(2, data)
    more = _bytes(9, unknown) if unknown else b""
    return _number(1, kind) + _bytes(2, peer) + _bytes(3, limit) + _number(4, status) + more


def _prefixed(world: Any, body: bytes) -> bytes:
    return _uint(len(body)) + body


def circuit_kinds() -> list[Kind]:
    """Return the kinds of hop and stop messages."""
    return [
        Kind(name, fields_of_values(name, _hop_values(None), _HOP_NAMES), _hop_values, _prefixed, encode)
        for name, encode in (("hop", _hop), ("stop", _stop))
    ]


def _texts(values: list[Any]) -> bytes:
    out = b""
    for value in values:
        body = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
        body += b"\n" if isinstance(value, str) else b""
        out += _uint(len(body)) + body
    return out


def multistream_kinds() -> list[Kind]:
    """Return the kinds of a dialer's proposals and of a listener's answers."""
    asked = [multistream.HEADER, "ls", "/b/1", "/a/1"]
    answered = [multistream.HEADER, "na", "/b/1"]
    return [
        Kind(
            name,
            fields_of_values(name, values, [f"text {i}" for i in range(len(values))]),
            lambda world, values=values: list(values),
            lambda world, body: body,
            lambda tree: _texts([v for v in tree if isinstance(v, str | bytes | msgspec.Raw)]),
        )
        for name, values in (("proposals", asked), ("answers", answered))
    ]


def text_kinds() -> list[Kind]:
    """Return the kinds of peer ids and addresses."""
    found = {"peer id": _ID, "address": "/ip4/198.51.100.7/tcp/4001"}
    return [
        Kind(
            name,
            fields_of(str, value, name),
            lambda world, value=value: value,
            lambda world, body: body,
            lambda tree: tree.encode("utf-8", "surrogatepass") if isinstance(tree, str) else repr(tree).encode(),
        )
        for name, value in found.items()
    ]


class _World(World):
    def give(self, kind: Kind, data: bytes) -> str:
        script = _Script(data)
        try:
            found = self._read(kind.name, data, script)
        except (PeerError, HandshakeFailure) as error:
            return str(error)
        finally:
            assert script.said < 4096, "a stranger's input causes too much output"
        return f"taken {type(found).__name__}"

    def _read(self, name: str, data: bytes, script: Any) -> Any:
        match name:
            case "certificate":
                return verified_key(data)
            case "meeting":
                found = _run(punch._receive(script))
                for address in found.addrs:
                    host_and_port_of(address)
                return found
            case "hop" | "stop":
                if name == "hop":
                    message = _run(circuit.read_message(script, circuit.HopMessage))
                else:
                    message = _run(circuit.read_message(script, circuit.StopMessage))
                circuit.status_name(message.status)
                circuit.observed_in(message.peer)
                circuit.key_in(message.peer)
                return message
            case "proposals":
                return _run(multistream.answer(script, ["/a/1", "/c/1"]))
            case "answers":
                return _run(multistream.propose(script, ["/a/1", "/b/1"]))
            case "peer id":
                return peer_key(data.decode(errors="replace"))
            case "address":
                return host_and_port_of(data.decode(errors="replace"))
        raise AssertionError(name)


class TransportTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "transport"
    about: ClassVar[str] = "certificates, meetings, circuits, multistream, peer ids"
    episode: ClassVar[int] = FOREVER

    def __init__(self) -> None:
        self.kinds = [
            meeting_kind(), *circuit_kinds(), *multistream_kinds(), *text_kinds(), certificate_kind(),
        ]  # fmt: skip

    def world(self, rng: random.Random) -> World:
        return _World()

    def types(self) -> dict[str, Any]:
        return {"meeting": punch._Meeting}
