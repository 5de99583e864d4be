"""Circuit relay v2: the messages of both of its protocols.
(https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md)

A peer that cannot be dialed keeps a place at a relay (RESERVE). Whoever wants it asks the relay for a circuit (CONNECT,
on a `hop` stream); the relay asks the peer (on a `stop` stream) and from then on copies bytes both ways. The messages'
protobuf is py-libp2p's; its relay and its client are not used: they copy through 4 KiB reads, take their circuits for
connections that nothing can follow, and leave a relayed peer when a limit is reached.
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
    "read_message",
    "status_name",
    "write_message",
]

HOP_ID: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_ID: Final = "/libp2p/circuit/relay/0.2.0/stop"
_MAX_BYTES: Final = 4096
_MAX_ID_BYTES: Final = 64
"""An Ed25519 PeerId has 38. To write 4 KiB in base58, only to see that they are none, takes milliseconds."""

Kind = TypeVar("Kind", HopMessage, StopMessage)


async def write_message(stream: trio.abc.SendStream, message: HopMessage | StopMessage) -> None:
    body = message.SerializeToString()
    length = len(body)
    head = bytes([length]) if length < 0x80 else bytes([length & 0x7F | 0x80, length >> 7])
    await stream.send_all(head + body)


async def read_message(stream: trio.abc.ReceiveStream, kind: type[Kind]) -> Kind:
    """One message. `PeerError` for what is none, or over 4 KiB."""
    length = shift = 0
    while True:
        (byte,) = await _read_exactly(stream, 1)
        length |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            break
        if shift > 14:
            raise PeerError("circuit message: its length has over two bytes")
    if length > _MAX_BYTES:
        raise PeerError(f"circuit message: {length} bytes")
    message = kind()
    body = await _read_exactly(stream, length)
    try:
        message.ParseFromString(body)
    except (DecodeError, ValueError, RecursionError) as error:  # implementations of protobuf differ
        raise PeerError(f"circuit message: {error}") from error
    return message


async def _read_exactly(stream: trio.abc.ReceiveStream, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = await stream.receive_some(length - len(data))
        if not more:
            raise PeerError("circuit message: the stream ended in it")
        data += more
    return bytes(data)


def status_name(status: Status.ValueType) -> str:
    """As the specification calls it; a number that it does not know stays one."""
    return Status.Name(status) if status in Status.values() else str(status)


def peer_in(key: PeerKey, seen_at: str | None) -> PeerId:
    """A peer as messages name it, with the address that the sender sees it at."""
    addrs = []
    if seen_at:
        with suppress(MultiaddrError, ValueError):  # a relay said it, and what it said can only be read
            addrs.append(Multiaddr(seen_at).to_bytes())
    return PeerId(id=ID.from_base58(peer_id(key)).to_bytes(), addrs=addrs)


def key_in(peer: PeerId) -> PeerKey:
    """Raises `PeerError`."""
    if not 0 < len(peer.id) <= _MAX_ID_BYTES:
        raise PeerError(f"circuit message: a peer id of {len(peer.id)} bytes")
    return peer_key(str(ID(peer.id)))


def observed_in(peer: PeerId) -> str | None:
    """The address in it, if there is one that we understand: only a hint."""
    try:
        return str(Multiaddr(peer.addrs[0])) if peer.addrs else None
    except (MultiaddrError, ValueError):
        return None
