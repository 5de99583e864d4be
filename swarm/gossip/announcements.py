"""Small messages to every member on a topic, never on a step's critical path.

`Gossip` uses py-libp2p's GossipSub without the defaults that would lose messages: a heartbeat of two minutes, a spam
guard that drops three of four messages at 50 a second, and subscriptions that drop messages beyond a queue of 32. In
their place are a validator that checks the bytes before they are delivered or forwarded, a size limit, one delivery
of the same bytes, bounded queues, and a budget for each neighbour (`transport.pubsub`).
"""

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import trio

from swarm.guard import Source, guarded
from swarm.transport.base import PeerKey, Unreachable

if TYPE_CHECKING:
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub

    from swarm.transport.libp2p import Libp2pTransport

__all__ = ["MAX_MESSAGE_BYTES", "Gossip"]

MAX_MESSAGE_BYTES: Final = 65_536
_MAX_RPC_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""Bytes of one GossipSub frame, which may hold several messages."""
_MAX_SEEN: Final = 4096
"""Messages remembered so that each is delivered once: over a minute's worth at 50 a second."""
_PROTOCOLS: Final = ("/meshsub/1.1.0",)
"""Not 1.2: its IDONTWANT frames save copies of large messages, but double the number of frames for small ones."""
_MAX_QUEUED: Final = 128
"""Frames queued for one neighbour. A burst can exceed the library's 32."""
_DEGREE, _DEGREE_LOW, _DEGREE_HIGH = 6, 4, 12
_HEARTBEAT_S: Final = 1
"""The mesh parameters D, D_low and D_high, and the heartbeat, of the GossipSub specification. They hold because the
library's adaptive gossip is off: it would set the heartbeat to a minute in a small or quiet swarm. `QuietRouter` makes
it slower while nothing changes."""
_GREET_S: Final = 2.0
"""Interval at which streams are opened to peers without one: they may have begun to gossip after they connected."""
_LOOK_S: Final = 10.0
"""How often peers without a stream are looked for while there are none and no connection is made: a stream may have
ended."""
_GREETING_S: Final = 5.0
"""Time limit for opening such a stream."""
_QUEUE_S: Final = 1.0
"""How long `publish` waits for neighbours whose queues are more than half full."""
_RESTART_S: Final = 5.0
"""Pause before the library's services are started again after an error has ended them."""


class _Seen:
    """The digests of the last `_MAX_SEEN` messages."""

    def __init__(self) -> None:
        self._digests: dict[bytes, None] = {}

    def has(self, data: bytes) -> bool:
        return sha256(data).digest() in self._digests

    def add(self, data: bytes) -> bool:
        """Remember `data`; whether it is new."""
        digest = sha256(data).digest()
        if digest in self._digests:
            return False
        self._digests[digest] = None
        if len(self._digests) > _MAX_SEEN:
            del self._digests[next(iter(self._digests))]
        return True


class Gossip:
    """One topic at one peer. `run` needs a transport that serves, and ends with it."""

    def __init__(self, transport: "Libp2pTransport", topic: str, validate: Callable[[bytes], bool]) -> None:
        """`validate` is called for each message of another peer before it is delivered or forwarded."""
        self.topic = topic
        self._validate = validate
        self._seen = _Seen()
        self._deliver: Callable[[bytes], None] | None = None
        self._transport = transport
        self._pubsub: Pubsub | None = None
        self._has_started = False

    async def run(
        self, deliver: Callable[[bytes], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Gossip until cancelled. `deliver` gets each message of other peers once; it must not block."""
        if self._transport.host is None:
            raise Unreachable("gossip needs a transport that serves")
        while True:
            with guarded(Source.GOSSIP, self.topic):
                await self._run_services(deliver, task_status)
            await trio.sleep(_RESTART_S)

    async def _run_services(self, deliver: Callable[[bytes], None], task_status: trio.TaskStatus[None]) -> None:
        from libp2p.tools.anyio_service import (
            background_trio_service,
        )  # takes a second to import, so memory swarms do not

        host = self._transport.host
        if host is None:
            raise Unreachable("the transport does not serve any more")
        network: Any = host.get_network()
        notifees = list(network.notifees)
        pubsub, router = self._build()
        try:
            async with background_trio_service(router), background_trio_service(pubsub):
                await pubsub.wait_until_ready()
                pubsub.set_topic_validator(self.topic, self._on_message, is_async_validator=False)
                subscription = await pubsub.subscribe(self.topic)
                self._deliver, self._pubsub = deliver, pubsub
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._greet, pubsub)
                    if not self._has_started:
                        self._has_started = True
                        task_status.started()
                    while True:
                        await subscription.get()  # delivered already, see `_on_message`: this only empties the queue
        finally:
            self._deliver = self._pubsub = None
            for notifee in network.notifees[:]:
                if notifee not in notifees:
                    network.remove_notifee(notifee)
            for protocol in _PROTOCOLS:
                host.remove_stream_handler(protocol)  # type: ignore[arg-type]

    async def publish(self, data: bytes) -> None:
        """Announce `data`. Raises `ValueError` beyond `MAX_MESSAGE_BYTES`, `Unreachable` if `run` is not running."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"an announcement of {len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
        if self._deliver is None:
            raise Unreachable(f"not gossiping on {self.topic}")
        pubsub = self._pubsub
        assert pubsub is not None
        # A burst waits here for its neighbours, since the library drops frames beyond a full queue. `_QUEUE_S` bounds
        # the wait for a neighbour that is stuck.
        with trio.move_on_after(_QUEUE_S):
            while any(len(queue) > _MAX_QUEUED // 2 for queue in pubsub.peer_queues.values()):  # noqa: ASYNC110
                await trio.sleep(0.01)
        await pubsub.publish(self.topic, data)

    def has_seen(self, data: bytes) -> bool:
        """Whether this peer or another has announced `data` already."""
        return self._seen.has(data)

    def _build(self) -> tuple[Any, Any]:
        from libp2p.custom_types import TProtocol

        from swarm.transport.gossip_router import QuietRouter
        from swarm.transport.pubsub import BoundedPubsub

        router = QuietRouter(
            protocols=[TProtocol(protocol) for protocol in _PROTOCOLS],
            degree=_DEGREE,
            degree_low=_DEGREE_LOW,
            degree_high=_DEGREE_HIGH,
            heartbeat_interval=_HEARTBEAT_S,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,
            eclipse_protection_enabled=False,
        )
        pubsub = BoundedPubsub(
            self._transport.host,
            router,
            msg_id_constructor=_message_id,
            max_inbound_rpc_size=_MAX_RPC_BYTES,
            topic=self.topic,
            max_message_bytes=MAX_MESSAGE_BYTES,
            max_queued=_MAX_QUEUED,
            drop=self._transport.disconnect,
        )
        return pubsub, router

    def _on_message(self, forwarder: Any, message: "rpc_pb2.Message") -> bool:
        """GossipSub's validator. It also delivers, because the subscription's queue may drop messages."""
        if forwarder == self._transport.host_id:
            self._seen.add(message.data)
            return True
        if len(message.data) > MAX_MESSAGE_BYTES or not self._validate(message.data):
            return False
        if self._deliver is not None and self._seen.add(message.data):
            self._deliver(message.data)
        return True

    async def _greet(self, pubsub: "Pubsub") -> None:
        """Open a stream to every peer that has none, now and then; all at once, so that a slow peer delays no other."""
        while True:
            connected = self._transport.connected
            if without := [peer for peer in self._transport.peers() if not self._has_stream(pubsub, peer)]:
                async with trio.open_nursery() as nursery:
                    for peer in without:
                        nursery.start_soon(self._greet_one, pubsub, peer)
                await trio.sleep(_GREET_S)
            else:
                with trio.move_on_after(_LOOK_S):
                    await connected.wait()

    def _has_stream(self, pubsub: "Pubsub", peer: PeerKey) -> bool:
        return self._transport.id_of(peer) in pubsub.peers

    async def _greet_one(self, pubsub: "Pubsub", peer: PeerKey) -> None:
        with guarded(Source.GOSSIP, peer):
            await pubsub.ensure_peer_stream(self._transport.id_of(peer), _GREETING_S)


def _message_id(message: "rpc_pb2.Message") -> bytes:
    """The id of a message: the same bytes on a topic are one message, regardless of the sender."""
    return sha256("|".join(message.topicIDs).encode() + b"\0" + message.data).digest()
