"""One process's end of the swarm: store, model, transport, gossip and runtime, opened in order, closed in reverse.

The seed, a node and a relay differ in their core and in the application around it. What lies between is this.
"""

import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from codec import open_manifest
from codec.errors import PeerError
from codec.sign import Key
from swarm.gossip.announcements import Gossip
from swarm.protocol.core.events import Send
from swarm.protocol.core.tuning import Tuning
from swarm.protocol.core.wire import Work
from swarm.runtime import Application, Core, Manifests, Runtime, RuntimeLimits, in_thread
from swarm.store import Store
from swarm.transport.base import Unreachable
from swarm.transport.dialer import DialRules
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.parallel import DEFAULT_MBIT
from swarm.transport.rules import PeerPolicy, TransportRules
from swarm.transport.yamux import YamuxLimits

if TYPE_CHECKING:
    from node.host.state_room import StateRoom
    from node.saved.holder import Holder
    from swarm.runtime.replica.jobs import Jobs
    from swarm.runtime.replica.model import Model

__all__ = ["Endpoint", "NetworkOptions", "open_store", "store_folder"]

_TOPIC: Final = "/swarm-node/{}/manifests/1"
_GOSSIP_AFTER_S: Final = (1.0, 2.0)
"""A manifest is announced after a random time between these, unless another member has announced it. The trees carry
the seal; gossip is for members that no tree reaches. It waits until a version's last pieces have most likely arrived,
because forty small messages would compete with them for processors."""
_LEAVE_S: Final = 2.0
"""For the goodbye at the end: spot machines are announced only shortly before they are taken away."""


def store_folder(home: Path, authority: bytes) -> Path:
    """The folder in `home` for the swarm of this authority."""
    return home / f"swarm-{authority.hex()[:16]}"


def open_store(home: Path, authority: bytes, *, checkpoints_kept: int = 1) -> Store:
    """The store in `home` for the swarm of this authority. Raises `UsageError` when another process uses it."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Store(store_folder(home, authority), authority, checkpoints_kept=checkpoints_kept)


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """How an endpoint meets the network."""

    listen: tuple[str, ...]
    """Addresses to listen on, as multiaddr text."""
    announce: tuple[str, ...] = ()
    """Addresses at which others reach it, where those differ."""
    via: tuple[str, ...] = ()
    """Relays at which it keeps a reservation."""
    up_mbit: float | None = None
    """What the uplink carries, in Mbit/s, if the user said."""
    relay_for: Callable[[bytes], bool] | None = None
    """Which peers may reserve a place at this member; None: it is no relay."""
    outward: Callable[[Sequence[str]], tuple[str, ...]] = tuple
    """Maps the addresses that are listened on to those that the core is told."""
    state_room: "StateRoom | None" = None
    """What it gives to saved states; None: nothing. Only with a model."""


@dataclass
class Endpoint:
    """A running runtime with everything under it."""

    runtime: Runtime
    transport: Libp2pTransport
    store: Store
    manifests: Manifests
    jobs: "Jobs | None"
    """None for a relay."""
    gossip: Gossip
    holder: "Holder | None" = None
    """Of fragments of saved states; None: it gives nothing to them."""
    addrs: tuple[str, ...] = ()
    """The addresses listened on, once it runs."""

    @classmethod
    def build(
        cls,
        core: Core,
        key: Key,
        authority: bytes,
        store: Store,
        application: Application,
        network: NetworkOptions,
        *,
        tuning: Tuning,
        model: "Model | None" = None,
    ) -> "Endpoint":
        """Put the parts together; nothing runs yet. `tuning`: the core's. `model`: None for a relay."""
        limits = RuntimeLimits()
        up_mbit = network.up_mbit
        if up_mbit and up_mbit < DEFAULT_MBIT:  # above it, processors are the limit
            limits = replace(limits, up_mbit=up_mbit)
        manifests = Manifests(authority)
        for seal in store.records.seals():
            manifests.note(seal.manifest)
        # The core decides when a peer is dialed again; the transport's own pause must have passed by then.
        pause_s = tuning.dial_retry_s / 8
        yamux, dial = YamuxLimits(), DialRules(backoff_first_s=pause_s, backoff_most_s=pause_s)
        services = None
        if model is not None:
            from swarm.runtime.services import ReplicaServices

            services = ReplicaServices.build(store, model, manifests, limits, in_thread)
        holder: Holder | None = None
        if network.state_room is not None and services is not None:
            from node.host.state_room import build_holder

            holder = build_holder(network.state_room, authority, store, services, manifests)
        visits = holder.knows if holder is not None else lambda peer: False
        transport = Libp2pTransport(
            key, network.listen, network.announce,
            up_mbit=DEFAULT_MBIT if up_mbit is None else up_mbit,
            via=network.via,
            policy=PeerPolicy(
                admits=core.admits, knows=lambda peer: core.knows(peer) or visits(peer), may_reserve=network.relay_for
            ),
            rules=TransportRules(limits=yamux.lean() if key.public == authority else yamux, dial=dial),
        )  # fmt: skip
        gossip = Gossip(transport, _TOPIC.format(authority.hex()[:16]), _is_signed_by(authority))

        async def announce_manifest(sealed: bytes) -> None:
            await trio.sleep(random.uniform(*_GOSSIP_AFTER_S))
            if not gossip.has_seen(sealed):
                with contextlib.suppress(Unreachable, ValueError):
                    await gossip.publish(sealed)

        runtime = Runtime(
            core, transport, store, manifests, application,
            services=services, announce=announce_manifest, limits=limits, outward=network.outward,
        )  # fmt: skip
        if holder is not None:
            holder.pacer = runtime.peers.pacer
            transport.serve_protocol(holder.protocol, holder.serve)
        return cls(runtime, transport, store, manifests, None if services is None else services.jobs, gossip, holder)

    @contextlib.asynccontextmanager
    async def running(self, *, leave: bool) -> AsyncIterator["Endpoint"]:
        """Run while the block does. `leave`: release the lease and say goodbye at the end, however the block ends."""
        over = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._live, over, leave)
            try:
                yield self
            finally:
                over.set()

    async def _live(self, over: trio.Event, leave: bool, *, task_status: trio.TaskStatus[None]) -> None:
        """Outlives the cancellation that ends the block, once started: a goodbye needs a running runtime."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                self.addrs = tuple(await nursery.start(self.runtime.run))
                await nursery.start(self.gossip.run, lambda sealed: nursery.start_soon(self._take_gossip, sealed))
                await self.runtime.post_stored_chunks()
                if self.holder is not None:
                    nursery.start_soon(self.holder.drop_expired)
                scope.shield = True
                task_status.started()
                await over.wait()
                if leave:
                    with trio.move_on_after(_LEAVE_S):
                        await self.runtime.leave()
                nursery.cancel_scope.cancel()

    async def _take_gossip(self, sealed: bytes) -> None:
        await self.runtime.take_gossip(sealed)

    def send_work(self, peer: bytes, body: bytes) -> None:
        """Send a `Work` body to `peer`; it is lost when there is no session."""
        self.runtime.perform([Send(peer, Work(body))])


def _is_signed_by(authority: bytes) -> Callable[[bytes], bool]:
    def is_signed(sealed: bytes) -> bool:
        try:
            open_manifest(sealed, authority)
        except PeerError:
            return False
        return True

    return is_signed
