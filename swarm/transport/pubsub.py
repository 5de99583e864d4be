"""py-libp2p's GossipSub with bounds on what one neighbour may send and cost.

The library reads a neighbour's frames (RPCs) as fast as they come, starts a task for each message in them, keeps state
for each topic that a peer names, verifies an address record twice in each frame, and ends with the first exception in
any of its tasks. So we read the frames. From each frame only the parts that GossipSub needs for our one topic go to the
library (`trimmed`). They are charged to the neighbour first (`Neighbours`), and its messages are validated one after
another, in the task that reads. A neighbour that is over its budget is not read: its messages come later, none is lost.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import trio
from google.protobuf.message import DecodeError
from libp2p.peer.id import ID
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub

from codec.errors import PeerError
from swarm.guard import Source, guarded
from swarm.protocol.core.bucket import Bucket
from swarm.transport.base import PeerKey
from swarm.transport.connection.migrating_connection import lost_is_broken
from swarm.transport.connection.muxer import MuxedStream
from swarm.transport.identity import peer_key
from swarm.transport.tasks import GuardedService

__all__ = ["BoundedPubsub", "Neighbours", "cost_of", "trimmed"]

_MESSAGES_PER_S: Final = 25.0
_MESSAGES_AT_ONCE: Final = 250.0
"""Budget of one neighbour; 1.0 is the cost of a new message. That is some 0.5 ms of CPU time (to verify its sender's
and the authority's signature, and a copy for each of our neighbours), so 1 % of a core in the long run. There are a few
seals a minute; a burst of 300 messages waits for 2 s."""
_FORGED_PER_S: Final = 0.1
_FORGED_AT_ONCE: Final = 5.0
"""Invalid messages that a neighbour may forward before it is disconnected. An honest one verifies before it
forwards."""
_RPC_COST: Final = 0.1
"""For each frame."""
_BYTES_A_MESSAGE: Final = 16_384
"""This many bytes of a frame cost as much as a message: parsing the worst 256 KiB takes some milliseconds."""
_KNOWN_COST: Final = 0.1
"""For a message that we had already: most are, since each neighbour in the mesh sends each message once."""
_SUBSCRIPTION_COST: Final = 1.0
"""The library starts three tasks for a subscription."""
_CONTROL_COST: Final = 0.5
"""For each control message of the other kinds."""
_WANTED_COST: Final = 0.5
"""For each message that a neighbour requests again: it may have 64 KiB."""
_MAX_SUBSCRIPTIONS: Final = 8
_MAX_MESSAGES: Final = 256
_MAX_OFFERED_IDS: Final = 256
_MAX_WANTED_IDS: Final = 64
_MAX_LISTS: Final = 4
"""Control messages of each kind in a frame; GossipSub sends one for each topic."""
_MAX_BACK_OFF_S: Final = 600
_ORIGIN: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_ORIGIN_BYTES: Final = 38
"""First bytes and length of an Ed25519 PeerId; our peers have no other. The library would accept any key that comes
with a message, raise undocumented errors for an invalid one, and take milliseconds for an RSA key of thousands of
bits."""
_READ_BYTES: Final = 65_536
_MAX_NEIGHBOURS: Final = 4096
"""Neighbours whose budget is remembered."""
_PAUSE_S: Final = 10.0
"""The longest pause before a neighbour is read again; one frame may cost more than the budget holds."""


class Neighbours:
    """The budget of each neighbour. Pure; the clock is an argument."""

    def __init__(self) -> None:
        self._work: dict[PeerKey, Bucket] = {}
        self._forged: dict[PeerKey, Bucket] = {}

    def charge(self, peer: PeerKey, cost: float, now_s: float) -> float:
        """Charge work to a neighbour. Returns the seconds to wait before doing it."""
        return self._bucket(self._work, peer, _MESSAGES_PER_S, _MESSAGES_AT_ONCE).spend(cost, now_s)

    def charge_forgery(self, peer: PeerKey, now_s: float) -> bool:
        """Note that a neighbour forwarded an invalid message. Returns whether it has done so too often."""
        return not self._bucket(self._forged, peer, _FORGED_PER_S, _FORGED_AT_ONCE).take(1.0, now_s)

    @staticmethod
    def _bucket(table: dict[PeerKey, Bucket], peer: PeerKey, rate: float, burst: float) -> Bucket:
        bucket = table.pop(peer, None) or Bucket(rate, burst)
        table[peer] = bucket  # the least recently used is first
        if len(table) > _MAX_NEIGHBOURS:
            del table[next(iter(table))]
        return bucket


def trimmed(rpc: rpc_pb2.RPC, topic: str, max_message_bytes: int) -> rpc_pb2.RPC:
    """The parts of a frame that concern `topic`, and no more of them than an honest neighbour sends at a time.

    It drops address records, extensions, other topics, and peers to connect to, so that they have no effect.
    """
    kept = rpc_pb2.RPC()
    for message in rpc.publish[:_MAX_MESSAGES]:
        if (
            list(message.topicIDs) == [topic]
            and len(message.data) <= max_message_bytes
            and len(message.from_id) == _ORIGIN_BYTES
            and message.from_id.startswith(_ORIGIN)
        ):
            kept.publish.add().CopyFrom(message)
    for option in rpc.subscriptions[:_MAX_SUBSCRIPTIONS]:
        if option.topicid == topic:
            kept.subscriptions.add(subscribe=option.subscribe, topicid=topic)
    if rpc.HasField("control"):
        _trim_control(rpc.control, kept.control, topic)
    return kept


def _trim_control(control: rpc_pb2.ControlMessage, kept: rpc_pb2.ControlMessage, topic: str) -> None:
    kept.SetInParent()
    for ihave in control.ihave[:_MAX_LISTS]:
        if ihave.topicID == topic:
            kept.ihave.add(topicID=topic, messageIDs=list(dict.fromkeys(ihave.messageIDs[:_MAX_OFFERED_IDS])))
    for iwant in control.iwant[:_MAX_LISTS]:
        kept.iwant.add(messageIDs=list(dict.fromkeys(iwant.messageIDs[:_MAX_WANTED_IDS])))
    if any(graft.topicID == topic for graft in control.graft[:_MAX_LISTS]):
        kept.graft.add(topicID=topic)
    pruned = [prune for prune in control.prune[:_MAX_LISTS] if prune.topicID == topic]
    if pruned:
        kept.prune.add(topicID=topic, backoff=min(max(prune.backoff for prune in pruned), _MAX_BACK_OFF_S))


def cost_of(rpc: rpc_pb2.RPC, length: int) -> float:
    """The cost of a trimmed frame without its messages. `length`: the frame's bytes before it was trimmed."""
    control = rpc.control
    return (
        _RPC_COST
        + length / _BYTES_A_MESSAGE
        + _SUBSCRIPTION_COST * len(rpc.subscriptions)
        + _CONTROL_COST * (len(control.graft) + len(control.prune) + len(control.ihave))
        + _WANTED_COST * sum(len(iwant.messageIDs) for iwant in control.iwant)
    )


class BoundedPubsub(GuardedService, Pubsub):
    """The library's service for one topic. `drop`: disconnects a neighbour. `max_queued`: frames that wait to be sent
    to one neighbour."""

    task_source = Source.GOSSIP

    def __init__(
        self,
        *args: Any,
        topic: str,
        max_message_bytes: int,
        max_queued: int,
        drop: Callable[[PeerKey], Awaitable[None]],
        **options: Any,
    ) -> None:
        super().__init__(*args, allowed_topics={topic}, **options)
        self._topic = topic
        self._max_message_bytes = max_message_bytes
        self._max_queued = max_queued
        self._drop = drop
        self._neighbours = Neighbours()

    async def continuously_read_stream(self, stream: Any) -> None:
        """Read a neighbour's frames until its stream ends. Replaces the library's method. Never raises."""
        peer = peer_key(str(stream.muxed_conn.peer_id))
        assert isinstance(stream.muxed_stream, MuxedStream)
        frames = _Frames(stream.muxed_stream.stream, self.max_inbound_rpc_size)
        with guarded(Source.GOSSIP, peer) as outcome, lost_is_broken():
            while (body := await frames.next()) is not None:
                await self.handle_frame(stream.muxed_conn.peer_id, peer, body)
        if outcome.is_rule_broken:
            await self._drop(peer)

    async def handle_frame(self, neighbour: ID, peer: PeerKey, body: bytes) -> None:
        """Handle one frame, as soon as its neighbour's budget allows it. Raises `PeerError`."""
        rpc = rpc_pb2.RPC()
        try:
            rpc.ParseFromString(body)
        except (DecodeError, ValueError, RecursionError) as error:  # protobuf's implementations raise different errors
            raise PeerError(f"gossip: {error}") from error
        rpc = trimmed(rpc, self._topic, self._max_message_bytes)
        await self._charge(peer, cost_of(rpc, len(body)))
        for message in rpc.publish:
            await self._handle_message(neighbour, peer, message)
        for option in rpc.subscriptions:
            self.handle_subscription(neighbour, option)
        if rpc.HasField("control"):
            await self.router.handle_rpc(rpc, neighbour)

    async def _handle_message(self, neighbour: ID, peer: PeerKey, message: rpc_pb2.Message) -> None:
        if self._is_msg_seen(message):
            await self._charge(peer, _KNOWN_COST)
            return
        await self._charge(peer, 1.0)
        await self.push_msg(neighbour, message)
        if not self._is_msg_seen(message) and self._neighbours.charge_forgery(peer, trio.current_time()):
            raise PeerError("gossip: it forwards invalid messages again and again")

    async def _charge(self, peer: PeerKey, cost: float) -> None:
        """Charge a neighbour and wait as long as its budget demands; always lets other tasks run."""
        await trio.sleep(min(self._neighbours.charge(peer, cost, trio.current_time()), _PAUSE_S))

    async def handle_sending_messages(self, peer_id: Any, stream: Any, queue: Any) -> None:
        queue._queue.max_size = self._max_queued  # the library has no public setting for it
        await super().handle_sending_messages(peer_id, stream, queue)


class _Frames:
    """Splits a neighbour's stream into frames: each is a length (varint) and that many bytes."""

    def __init__(self, stream: trio.abc.ReceiveStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next frame; None at the end of the stream, also inside a frame. Raises `PeerError`, and the stream's own
        errors."""
        while (head := self._head()) is None or len(self._buffer) < sum(head):
            data = await self._stream.receive_some(_READ_BYTES)
            if not data:
                return None
            self._buffer += data
        start, length = head
        body = bytes(self._buffer[start : start + length])
        del self._buffer[: start + length]
        return body

    def _head(self) -> tuple[int, int] | None:
        """Where the next frame's body begins, and its length; None if its head has not arrived."""
        length = 0
        for at, byte in enumerate(self._buffer[:4]):
            length |= (byte & 0x7F) << (7 * at)
            if not byte & 0x80:
                if length > self._max_bytes:
                    raise PeerError(f"gossip: a frame of {length} bytes")
                return at + 1, length
        if len(self._buffer) >= 4:
            raise PeerError("gossip: a frame's length field has over four bytes")
        return None
