"""py-libp2p's GossipSub with bounds: what one neighbour may send, what that costs, what becomes of it when it is wrong.

The library reads a neighbour's frames (RPCs) as fast as they come, starts a task for each message in them, keeps state
for each topic that anybody names, verifies an address record twice a frame, and is ended by an exception in any task.
Here frames are read by us. Of each only what GossipSub needs for our one topic goes on to the library (`trimmed`), it
is paid for before it is looked at (`Neighbours`), and its messages are judged one after another, in the reader's task.
A neighbour that is over its budget is not read: nothing that an honest one says is lost, it only comes later.
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

__all__ = ["BoundedPubsub", "Neighbours", "cost_of", "trimmed"]

_MESSAGES_PER_S: Final = 25.0
_MESSAGES_AT_ONCE: Final = 250.0
"""Of one neighbour. A message that is news costs us some 0.5 ms (its sender's signature, the authority's, a copy for
each neighbour of ours): 1 % of a processor in the long run. Seals are some a minute; a burst of 300 waits for 2 s."""
_FORGED_PER_S: Final = 0.1
_FORGED_AT_ONCE: Final = 5.0
"""Messages that do not verify, before their forwarder is disconnected. An honest one verifies before it forwards."""
_RPC_COST: Final = 0.1
_BYTES_A_MESSAGE: Final = 16_384
"""So many bytes of a frame cost as much as a message: to parse 256 KiB of the worst takes some milliseconds."""
_KNOWN_COST: Final = 0.1
"""A message that we had already. Each neighbour in the mesh sends each message once, so most are such."""
_SUBSCRIPTION_COST: Final = 1.0
"""The library starts three tasks for one."""
_CONTROL_COST: Final = 0.5
_WANTED_COST: Final = 0.5
"""For each message that a neighbour asks for once more: it may be 64 KiB."""
_MAX_SUBSCRIPTIONS: Final = 8
_MAX_MESSAGES: Final = 256
_MAX_OFFERED_IDS: Final = 256
_MAX_WANTED_IDS: Final = 64
_MAX_LISTS: Final = 4
"""Of each kind of control message: GossipSub sends one a topic."""
_MAX_BACK_OFF_S: Final = 600
_ORIGIN: Final = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_ORIGIN_BYTES: Final = 38
"""How an Ed25519 PeerId begins, and its length; no peer of ours has another one. The library would take any key that
comes with a message: it raises what it likes for rubbish, and an RSA key of thousands of bits takes milliseconds."""
_READ_BYTES: Final = 65_536
_MAX_NEIGHBOURS: Final = 4096
_PAUSE_S: Final = 10.0
"""The longest that a neighbour waits at a time; a frame may cost more than its budget holds."""


class Neighbours:
    """What each neighbour has cost so far. Pure; the clock is an argument."""

    def __init__(self) -> None:
        self._work: dict[PeerKey, Bucket] = {}
        self._forged: dict[PeerKey, Bucket] = {}

    def worked(self, peer: PeerKey, cost: float, now_s: float) -> float:
        """It makes us work: seconds to wait before."""
        return self._bucket(self._work, peer, _MESSAGES_PER_S, _MESSAGES_AT_ONCE).spend(cost, now_s)

    def forged(self, peer: PeerKey, now_s: float) -> bool:
        """It forwarded what does not verify: whether that was once too often."""
        return not self._bucket(self._forged, peer, _FORGED_PER_S, _FORGED_AT_ONCE).take(1.0, now_s)

    @staticmethod
    def _bucket(table: dict[PeerKey, Bucket], peer: PeerKey, rate: float, burst: float) -> Bucket:
        bucket = table.pop(peer, None) or Bucket(rate, burst)
        table[peer] = bucket  # the one used last stands last
        if len(table) > _MAX_NEIGHBOURS:
            del table[next(iter(table))]
        return bucket


def trimmed(rpc: rpc_pb2.RPC, topic: str, max_message_bytes: int) -> rpc_pb2.RPC:
    """Of a frame what concerns `topic`, and no more of it than an honest neighbour sends at a time. Nothing else has an
    effect: address records, extensions, other topics, other peers to connect to."""
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
    """What a trimmed frame, which had `length` bytes, costs us but for its messages."""
    control = rpc.control
    return (
        _RPC_COST
        + length / _BYTES_A_MESSAGE
        + _SUBSCRIPTION_COST * len(rpc.subscriptions)
        + _CONTROL_COST * (len(control.graft) + len(control.prune) + len(control.ihave))
        + _WANTED_COST * sum(len(iwant.messageIDs) for iwant in control.iwant)
    )


class BoundedPubsub(Pubsub):
    """The library's service for one topic. `drop`: disconnects a neighbour."""

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

    @property
    def manager(self) -> Any:
        """The library's, whose tasks end by themselves: an exception in one would end the service."""
        return _GuardedTasks(super().manager)

    async def continuously_read_stream(self, stream: Any) -> None:
        """Read a neighbour's frames until its stream ends, in place of the library. Never raises."""
        peer = peer_key(str(stream.muxed_conn.peer_id))
        assert isinstance(stream.muxed_stream, MuxedStream)
        frames = _Frames(stream.muxed_stream.stream, self.max_inbound_rpc_size)
        with guarded(Source.GOSSIP, peer) as outcome, lost_is_broken():
            while (body := await frames.next()) is not None:
                await self.take_frame(stream.muxed_conn.peer_id, peer, body)
        if outcome.is_rule_broken:
            await self._drop(peer)

    async def take_frame(self, neighbour: ID, peer: PeerKey, body: bytes) -> None:
        """Do what one frame says, when its neighbour's budget allows it. Raises `PeerError`."""
        rpc = rpc_pb2.RPC()
        try:
            rpc.ParseFromString(body)
        except (DecodeError, ValueError, RecursionError) as error:  # implementations of protobuf differ
            raise PeerError(f"gossip: {error}") from error
        rpc = trimmed(rpc, self._topic, self._max_message_bytes)
        await self._pay(peer, cost_of(rpc, len(body)))
        for message in rpc.publish:
            await self._take_message(neighbour, peer, message)
        for option in rpc.subscriptions:
            self.handle_subscription(neighbour, option)
        if rpc.HasField("control"):
            await self.router.handle_rpc(rpc, neighbour)

    async def _take_message(self, neighbour: ID, peer: PeerKey, message: rpc_pb2.Message) -> None:
        if self._is_msg_seen(message):
            await self._pay(peer, _KNOWN_COST)
            return
        await self._pay(peer, 1.0)
        await self.push_msg(neighbour, message)
        if not self._is_msg_seen(message) and self._neighbours.forged(peer, trio.current_time()):
            raise PeerError("gossip: it forwards what does not verify, again and again")

    async def _pay(self, peer: PeerKey, cost: float) -> None:
        """At least others get their turn."""
        await trio.sleep(min(self._neighbours.worked(peer, cost, trio.current_time()), _PAUSE_S))

    async def handle_sending_messages(self, peer_id: Any, stream: Any, queue: Any) -> None:
        queue._queue.max_size = self._max_queued  # there is no public way
        await super().handle_sending_messages(peer_id, stream, queue)


class _Frames:
    """A neighbour's frames: each a length (varint) and as many bytes."""

    def __init__(self, stream: trio.abc.ReceiveStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    async def next(self) -> bytes | None:
        """The next one; None at the end, wherever that is. Raises `PeerError`, or as the stream does."""
        while (begins := self._head()) is None or len(self._buffer) < sum(begins):
            data = await self._stream.receive_some(_READ_BYTES)
            if not data:
                return None
            self._buffer += data
        at, length = begins
        body = bytes(self._buffer[at : at + length])
        del self._buffer[: at + length]
        return body

    def _head(self) -> tuple[int, int] | None:
        """Where the next frame's body begins and its length, if its head is there."""
        length = 0
        for at, byte in enumerate(self._buffer[:4]):
            length |= (byte & 0x7F) << (7 * at)
            if not byte & 0x80:
                if length > self._max_bytes:
                    raise PeerError(f"gossip: a frame of {length} bytes")
                return at + 1, length
        if len(self._buffer) >= 4:
            raise PeerError("gossip: a frame's length has over four bytes")
        return None


class _GuardedTasks:
    """A service's manager whose tasks are guarded. Daemons are not: their end is the service's, which begins anew."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def run_task(self, function: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> None:
        async def run() -> None:
            with guarded(Source.GOSSIP), lost_is_broken():
                await function(*args)

        self._manager.run_task(run, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)
