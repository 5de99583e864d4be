"""Circuit relay v2: the messages of its two protocols, `hop` and `stop`.

Specification: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md

A peer that cannot be dialed keeps a reservation at a relay (RESERVE). A peer that wants to reach it asks the relay for
a circuit (CONNECT, on a `hop` stream). The relay asks the reserved peer (on a `stop` stream), then copies bytes both
ways. The protobuf classes are py-libp2p's. Its relay and its client are not used: they copy through 4 KiB reads, cannot
move a connection from one circuit to the next, and drop a relayed peer when a limit is reached.
"""

from contextlib import suppress
from typing import Final, TypeVar

import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, Limit, PeerId, Reservation, Status, StopMessage
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from codec.errors import PeerError
from swarm.transport.base import PeerKey
from swarm.transport.identity import peer_id, peer_key

__all__ = [
    "HOP_ID",
    "STOP_ID",
    "HopMessage",
    "Limit",
    "Reservation",
    "Status",
    "StopMessage",
    "key_in",
    "observed_in",
    "peer_in",
    "read_exactly",
    "read_message",
    "status_name",
    "write_message",
]

HOP_ID: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_ID: Final = "/libp2p/circuit/relay/0.2.0/stop"
_MAX_BYTES: Final = 4096
"""Longest message; the specification's bound."""
_MAX_ID_BYTES: Final = 64
"""Longest peer id; an Ed25519 one has 38 bytes. Encoding 4 KiB in base58 only to refuse it would take milliseconds."""

Kind = TypeVar("Kind", HopMessage, StopMessage)


async def write_message(stream: trio.abc.SendStream, message: HopMessage | StopMessage) -> None:
    """Send the message behind its length, a varint of one or two bytes."""
    body = message.SerializeToString()
    length = len(body)
    head = bytes([length]) if length < 0x80 else bytes([length & 0x7F | 0x80, length >> 7])
    await stream.send_all(head + body)


async def read_message(stream: trio.abc.ReceiveStream, kind: type[Kind]) -> Kind:
    """Read one message. Raises `PeerError` if it does not parse, is longer than 4 KiB, or the stream ends in it."""
    length = shift = 0
    while True:
        (byte,) = await read_exactly(stream, 1, "circuit message")
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise PeerError("circuit message: its length field has over two bytes")
    if length > _MAX_BYTES:
        raise PeerError(f"circuit message: {length} bytes")
    message = kind()
    body = await read_exactly(stream, length, "circuit message")
    try:
        message.ParseFromString(body)
    except (DecodeError, ValueError, RecursionError) as error:  # protobuf's implementations raise different errors
        raise PeerError(f"circuit message: {error}") from error
    return message


async def read_exactly(stream: trio.abc.ReceiveStream, length: int, what: str) -> bytes:
    """Read `length` bytes. Raises `PeerError` if the stream ends before; `what` names the message in its text."""
    data = bytearray()
    while len(data) < length:
        more = await stream.receive_some(length - len(data))
        if not more:
            raise PeerError(f"{what}: the stream ended in it")
        data += more
    return bytes(data)


def status_name(status: Status.ValueType) -> str:
    """The specification's name of a status; a number that it does not define stays a number."""
    return Status.Name(status) if status in Status.values() else str(status)


def peer_in(key: PeerKey, seen_at: str | None) -> PeerId:
    """The message field for a peer. `seen_at`: its address as the sender sees it (multiaddr text)."""
    addrs = []
    if seen_at:
        with suppress(MultiaddrError, ValueError):  # a relay may have reported it, and text that parses may not encode
            addrs.append(Multiaddr(seen_at).to_bytes())
    return PeerId(id=ID.from_base58(peer_id(key)).to_bytes(), addrs=addrs)


def key_in(peer: PeerId) -> PeerKey:
    """The key of the peer in a message. Raises `PeerError`."""
    if not 0 < len(peer.id) <= _MAX_ID_BYTES:
        raise PeerError(f"circuit message: a peer id of {len(peer.id)} bytes")
    return peer_key(str(ID(peer.id)))


def observed_in(peer: PeerId) -> str | None:
    """The first address in a message's peer field (multiaddr text); None if it does not parse. Only a hint."""
    try:
        return str(Multiaddr(peer.addrs[0])) if peer.addrs else None
    except (MultiaddrError, ValueError):
        return None
