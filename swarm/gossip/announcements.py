"""Small announcements to everybody on a topic. Never on a step's critical path: trees carry what is due.

`Gossip` is py-libp2p's GossipSub with the defaults that would lose our messages turned off: its heartbeat is two
minutes, its spam guard drops three of four messages at fifty a second, its subscriptions drop what does not fit into 32
places. In their place stand our own rules: a validator that sees the bytes before anybody delivers or forwards them,
a size limit, one delivery for the same bytes, bounded queues, and a budget for each neighbour (`transport.pubsub`).
`MemoryGossip` does the same between memory transports.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

import trio

from swarm.guard import Source, guarded
from swarm.transport.base import PeerKey, Unreachable
from swarm.transport.memory import MemoryTransport

if TYPE_CHECKING:
    from libp2p.pubsub.pb import rpc_pb2
    from libp2p.pubsub.pubsub import Pubsub

    from swarm.transport.libp2p import Libp2pTransport

__all__ = ["MAX_MESSAGE_BYTES", "Announcer", "Gossip", "MemoryGossip"]

MAX_MESSAGE_BYTES: Final = 65_536
_MAX_RPC_BYTES: Final = 4 * MAX_MESSAGE_BYTES
"""Several messages may share one of GossipSub's frames."""
_MAX_SEEN: Final = 4096
"""Messages remembered so that they are delivered once. At fifty a second, over a minute's worth."""
_PROTOCOLS: Final = ("/meshsub/1.1.0",)
"""Not 1.2: its IDONTWANT doubles the number of frames, to save copies of messages that are large; ours are small."""
_MAX_QUEUED: Final = 128
"""Frames that wait for one neighbour. The library's 32 are fewer than the messages of one busy moment."""
_DEGREE, _DEGREE_LOW, _DEGREE_HIGH = 6, 4, 12
_HEARTBEAT_S: Final = 1
_GREET_S: Final = 2.0
"""How often peers that have no GossipSub stream of ours are tried: they may have begun to gossip after we met."""
_GREETING_S: Final = 5.0
_QUEUE_S: Final = 1.0
_AGAIN_S: Final = 5.0
"""After the library's services have ended by an error of theirs, before they begin anew."""


class _Seen:
    """The digests of the last messages."""

    def __init__(self) -> None:
        self._digests: dict[bytes, None] = {}

    def has(self, data: bytes) -> bool:
        return sha256(data).digest() in self._digests

    def add(self, data: bytes) -> bool:
        """Whether `data` is news."""
        digest = sha256(data).digest()
        if digest in self._digests:
            return False
        self._digests[digest] = None
        if len(self._digests) > _MAX_SEEN:
            del self._digests[next(iter(self._digests))]
        return True


class Announcer(ABC):
    """One topic, at one peer."""

    def __init__(self, topic: str, validate: Callable[[bytes], bool]) -> None:
        """`validate` is called once for each message from elsewhere, before it is delivered or passed on."""
        self.topic = topic
        self._validate = validate
        self._seen = _Seen()
        self._deliver: Callable[[bytes], None] | None = None

    @abstractmethod
    async def run(
        self, deliver: Callable[[bytes], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Take part until cancelled. `deliver` gets each message of others once; it must not block."""

    @abstractmethod
    async def publish(self, data: bytes) -> None:
        """Tell everybody. At most `MAX_MESSAGE_BYTES` (`ValueError`). `Unreachable` when `run` is not running."""

    def has_seen(self, data: bytes) -> bool:
        """Whether it was announced already, by us or by others."""
        return self._seen.has(data)

    def _check_own(self, data: bytes) -> None:
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"an announcement of {len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
        if self._deliver is None:
            raise Unreachable(f"not gossiping on {self.topic}")

    def _judge(self, data: bytes) -> bool:
        """Whether to pass a message of others on; delivers it if it is valid and news."""
        if len(data) > MAX_MESSAGE_BYTES or not self._validate(data):
            return False
        if self._deliver is not None and self._seen.add(data):
            self._deliver(data)
        return True


class Gossip(Announcer):
    """Over libp2p. `run` needs the transport to serve, and ends with it."""

    def __init__(self, transport: "Libp2pTransport", topic: str, validate: Callable[[bytes], bool]) -> None:
        super().__init__(topic, validate)
        self._transport = transport
        self._pubsub: Pubsub | None = None
        self._has_started = False

    async def run(
        self, deliver: Callable[[bytes], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        if self._transport.host is None:
            raise Unreachable("gossip needs a transport that serves")
        while True:
            with guarded(Source.GOSSIP, self.topic):
                await self._run_services(deliver, task_status)
            await trio.sleep(_AGAIN_S)

    async def _run_services(self, deliver: Callable[[bytes], None], task_status: trio.TaskStatus[None]) -> None:
        from libp2p.tools.anyio_service import background_trio_service  # a second to import: not for memory swarms

        host = self._transport.host
        if host is None:
            raise Unreachable("the transport serves no more")
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
                        await subscription.get()  # delivered already (see _on_message); this empties its queue
        finally:
            self._deliver = self._pubsub = None
            for notifee in network.notifees[:]:
                if notifee not in notifees:
                    network.remove_notifee(notifee)
            for protocol in _PROTOCOLS:
                host.remove_stream_handler(protocol)  # type: ignore[arg-type]

    async def publish(self, data: bytes) -> None:
        self._check_own(data)
        pubsub = self._pubsub
        assert pubsub is not None
        # A burst waits here for its neighbours; beyond a full queue the library would drop it. A stuck one is not ours.
        with trio.move_on_after(_QUEUE_S):
            while any(len(queue) > _MAX_QUEUED // 2 for queue in pubsub.peer_queues.values()):  # noqa: ASYNC110
                await trio.sleep(0.01)
        await pubsub.publish(self.topic, data)

    def _build(self) -> tuple[Any, Any]:
        from libp2p.custom_types import TProtocol
        from libp2p.pubsub.gossipsub import GossipSub

        from swarm.transport.pubsub import BoundedPubsub

        router = GossipSub(
            protocols=[TProtocol(protocol) for protocol in _PROTOCOLS],
            degree=_DEGREE,
            degree_low=_DEGREE_LOW,
            degree_high=_DEGREE_HIGH,
            heartbeat_interval=_HEARTBEAT_S,
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
        """GossipSub's validator. Delivery happens here and not from the subscription, whose queue drops."""
        if forwarder == self._transport.host_id:
            self._seen.add(message.data)
            return True
        return self._judge(message.data)

    async def _greet(self, pubsub: "Pubsub") -> None:
        """Whoever does not answer keeps nobody else waiting."""
        while True:
            async with trio.open_nursery() as nursery:
                for peer in self._transport.peers():
                    nursery.start_soon(self._greet_one, pubsub, peer)
            await trio.sleep(_GREET_S)

    async def _greet_one(self, pubsub: "Pubsub", peer: PeerKey) -> None:
        with guarded(Source.GOSSIP, peer):
            await pubsub.ensure_peer_stream(self._transport.id_of(peer), _GREETING_S)


def _message_id(message: "rpc_pb2.Message") -> bytes:
    """The same bytes are the same message, whoever sends them again."""
    return sha256("|".join(message.topicIDs).encode() + b"\0" + message.data).digest()


class MemoryGossip(Announcer):
    """Between memory transports: each passes what is valid and new on to the peers that it is connected to."""

    def __init__(self, transport: MemoryTransport, topic: str, validate: Callable[[bytes], bool]) -> None:
        super().__init__(topic, validate)
        self._transport = transport
        self._nursery: trio.Nursery | None = None

    async def run(
        self, deliver: Callable[[bytes], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        members = self._transport.network.topics.setdefault(self.topic, {})
        async with trio.open_nursery() as nursery:
            self._nursery, self._deliver = nursery, deliver
            members[self._transport.key] = self.receive
            try:
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = self._deliver = None
                del members[self._transport.key]

    async def publish(self, data: bytes) -> None:
        self._check_own(data)
        await trio.lowlevel.checkpoint()
        if self._seen.add(data):
            self._pass_on(data)

    def receive(self, sender: PeerKey, data: bytes) -> None:
        """A neighbour passed `data` on to us."""
        if not self._seen.has(data) and self._judge(data):
            self._pass_on(data, sender)

    def _pass_on(self, data: bytes, sender: PeerKey = b"") -> None:
        assert self._nursery is not None
        for peer in self._transport.peers():
            if peer != sender:
                self._nursery.start_soon(partial(self._carry, peer, data))

    async def _carry(self, peer: PeerKey, data: bytes) -> None:
        network = self._transport.network
        await trio.sleep_until(network.arrival_s(self._transport.key, peer, len(data)))
        receive = network.topics.get(self.topic, {}).get(peer)
        if receive is not None and network.joined(self._transport.key, peer):
            receive(self._transport.key, data)
