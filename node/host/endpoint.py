"""One process's end of the swarm: store, model, transport, gossip and shell, opened in order, closed in reverse.

The seed, a node and a relay differ in their core and in their face; what lies between is this.
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
from swarm.runtime import Core, Face, Limits, Manifests, Shell, in_thread
from swarm.store import Store
from swarm.transport.base import Unreachable
from swarm.transport.dialer import DialRules
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.parallel import DEFAULT_MBIT
from swarm.transport.rules import PeerPolicy, TransportRules
from swarm.transport.yamux import Limits as Yamux

if TYPE_CHECKING:
    from swarm.runtime.replica.jobs import Jobs
    from swarm.runtime.replica.model import Model

__all__ = ["Endpoint", "open_store", "store_folder"]

_TOPIC: Final = "/swarm-node/{}/manifests/1"
_GOSSIP_AFTER_S: Final = (1.0, 2.0)
"""Trees carry a seal; gossip is for those whom none reaches. It begins, by whoever is first, when a version's last
pieces have most likely come: forty small messages would compete with them for processors."""
_LEAVE_S: Final = 2.0
"""Spot machines are told little before they are taken away; a goodbye that takes longer is not worth it."""


def store_folder(home: Path, authority: bytes) -> Path:
    """Where this home keeps what it has of that swarm."""
    return home / f"swarm-{authority.hex()[:16]}"


def open_store(home: Path, authority: bytes) -> Store:
    """What this home keeps of that swarm. Raises `UsageError` when another process uses it."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Store(store_folder(home, authority), authority)


@dataclass
class Endpoint:
    """A running shell with everything under it."""

    shell: Shell
    transport: Libp2pTransport
    store: Store
    manifests: Manifests
    jobs: "Jobs | None"
    addrs: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        core: Core,
        key: Key,
        authority: bytes,
        store: Store,
        face: Face,
        *,
        listen: tuple[str, ...],
        announce: tuple[str, ...] = (),
        tuning: Tuning,
        model: "Model | None" = None,
        limits: Limits | None = None,
        via: tuple[str, ...] = (),
        relay_for: Callable[[bytes], bool] | None = None,
        up_mbit: float | None = None,
        outward: Callable[[Sequence[str]], tuple[str, ...]] = tuple,
    ) -> "Endpoint":
        """Put the parts together; nothing runs yet. `model` None: a relay. `tuning`: the core's. `via`: relays at which
        it keeps a place. `relay_for`: it gives places itself, to whom this says. `up_mbit`: what the uplink
        carries, if anybody said. `outward`: what the core is told of the addresses that are listened on.
        """
        limits = limits or Limits()
        if up_mbit and up_mbit < DEFAULT_MBIT:  # above, it is processors that hold back
            limits = replace(limits, up_mbit=up_mbit)
        manifests = Manifests(authority)
        for seal in store.records.seals():
            manifests.note(seal.manifest)
        # Who is dialed again when is the core's decision; the transport's own pause must have passed by then.
        pause_s = tuning.dial_retry_s / 2
        yamux, dial = Yamux(), DialRules(backoff_first_s=pause_s, backoff_most_s=pause_s)
        transport = Libp2pTransport(
            key, listen, announce,
            up_mbit=DEFAULT_MBIT if up_mbit is None else up_mbit,
            via=via,
            policy=PeerPolicy(admits=core.admits, knows=core.knows, may_reserve=relay_for),
            rules=TransportRules(limits=yamux.lean() if key.public == authority else yamux, dial=dial),
        )  # fmt: skip
        jobs = answers = None
        if model is not None:
            from swarm.runtime.replica.jobs import Jobs
            from swarm.runtime.sessions.answers import Answers

            jobs = Jobs(store, model, manifests, limits, in_thread)
            answers = Answers(store, jobs, manifests, in_thread)
        gossip = Gossip(transport, _TOPIC.format(authority.hex()[:16]), _is_signed_by(authority))

        async def announce_manifest(sealed: bytes) -> None:
            await trio.sleep(random.uniform(*_GOSSIP_AFTER_S))
            if not gossip.has_seen(sealed):
                with contextlib.suppress(Unreachable, ValueError):
                    await gossip.publish(sealed)

        shell = Shell(
            core, transport, store, manifests, face,
            authority=authority, jobs=jobs, answers=answers, announce=announce_manifest, limits=limits,
            outward=outward,
        )  # fmt: skip
        endpoint = cls(shell, transport, store, manifests, jobs)
        endpoint._gossip = gossip
        return endpoint

    _gossip: Gossip | None = None

    @contextlib.asynccontextmanager
    async def running(self, *, leave: bool) -> AsyncIterator["Endpoint"]:
        """Run while the block does. `leave`: a member, which says goodbye at the end, however it ends."""
        over = trio.Event()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._live, over, leave)
            try:
                yield self
            finally:
                over.set()

    async def _live(self, over: trio.Event, leave: bool, *, task_status: trio.TaskStatus[None]) -> None:
        """Once started, this outlives the cancellation that ends the block: a goodbye needs a running shell."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                self.addrs = tuple(await nursery.start(self.shell.run))
                assert self._gossip is not None
                await nursery.start(self._gossip.run, lambda sealed: nursery.start_soon(self._hear_gossip, sealed))
                await self.shell.recall()
                scope.shield = True
                task_status.started()
                await over.wait()
                if leave:
                    with trio.move_on_after(_LEAVE_S):
                        await self.shell.leave()
                nursery.cancel_scope.cancel()

    async def _hear_gossip(self, sealed: bytes) -> None:
        await self.shell.gossiped(sealed)

    def send_work(self, peer: bytes, body: bytes) -> None:
        """Hand a `Work` body to the session with `peer`; lost when there is none."""
        self.shell.perform([Send(peer, Work(body))])


def _is_signed_by(authority: bytes) -> Callable[[bytes], bool]:
    def is_signed(sealed: bytes) -> bool:
        try:
            open_manifest(sealed, authority)
        except PeerError:
            return False
        return True

    return is_signed
