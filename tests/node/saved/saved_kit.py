"""Saved states in one process: coded states, and nodes that hold fragments behind real transports on loopback."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trio

from codec.sign import Key
from node.saved.coding import CodedState, code_file
from node.saved.conversation import STATE_PROTOCOL
from node.saved.folder import FragmentFolder
from node.saved.holder import Holder, ReplicaReader
from node.saved.placer import Placer
from swarm.protocol.membership.roster import Member
from swarm.runtime.sessions.pacing import Pacer
from swarm.transport.libp2p import Libp2pTransport
from swarm.transport.rules import PeerPolicy

KEY = Key(b"k" * 32)
"""The swarm's."""
OTHER = Key(b"o" * 32)
ANY = ("/ip4/127.0.0.1/tcp/0",)
BUDGET = 100_000_000


def coded(folder: Path, content: bytes, *, serial: int = 1, total: int = 4, key: Key = KEY) -> CodedState:
    source = folder / "source"
    source.write_bytes(content)
    return code_file(source, folder / f"coded{serial}", key, serial=serial, step=7, total=total)


async def idle(peer: bytes, lane: object, stream: object) -> None:
    """The lanes of versions are not used here."""


async def nothing(*_: object) -> Any:
    """No version, no blob, no block."""
    return None if _ else b""


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - what is waited for happens on disks
        await trio.sleep(0.05)


@dataclass
class Node:
    """One node of a `Bench`."""

    number: int
    key: Key
    folder: Path
    holder: Holder
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    addrs: tuple[str, ...] = ()
    has_left: bool = False
    """It is not in the roster any more."""

    @property
    def fragments(self) -> list[str]:
        """The fragments that are on its disk, as SERIAL/NUMBER."""
        return sorted(f"{int(path.parent.name, 16)}/{path.stem}" for path in self.folder.glob("*/*.fragment"))


class Bench:
    """Nodes, and the seed's placer on a transport of its own. `roster` is what everybody sees."""

    def __init__(self, folder: Path, nursery: trio.Nursery) -> None:
        self.folder, self.nursery = folder, nursery
        self.nodes: list[Node] = []
        self.told: list[tuple[str, int, int]] = []

    def roster(self) -> Any:
        here = [node for node in self.nodes if node.addrs and not node.has_left]
        return SimpleNamespace(
            members=[
                Member(node.number, node.key.public, node.addrs, True, f"node{node.number}", "", 100.0, False)
                for node in here
            ]
        )

    async def add_node(
        self,
        budget: int = BUDGET,
        wrap: Callable[[Holder], Holder] = lambda holder: holder,
        reader: ReplicaReader | None = None,
    ) -> Node:
        number = len(self.nodes)
        folder = self.folder / f"node{number}" / "state"
        folder.parent.mkdir(parents=True, exist_ok=True)
        holder = wrap(self.holder_at(folder, budget, reader))
        node = Node(number, Key(bytes([100 + number]) * 32), folder, holder)
        self.nodes.append(node)
        await self.start(node)
        return node

    def holder_at(self, folder: Path, budget: int = BUDGET, reader: ReplicaReader | None = None) -> Holder:
        reader = reader or ReplicaReader(nothing, nothing, nothing)
        return Holder(KEY.public, FragmentFolder(folder, KEY.public, budget), reader, self.roster)

    async def start(self, node: Node) -> None:
        """Serve a node, anew after `kill`."""
        node.scope = trio.CancelScope()
        holder = node.holder
        transport = Libp2pTransport(
            node.key, ANY, policy=PeerPolicy(admits=lambda peer: peer == KEY.public, knows=holder.knows)
        )
        transport.serve_protocol(STATE_PROTOCOL, holder.serve)

        async def run(*, task_status: trio.TaskStatus[list[str]]) -> None:
            with node.scope:
                await transport.serve(idle, task_status=task_status)

        node.addrs = tuple(await self.nursery.start(run))

    def kill(self, node: Node) -> None:
        """End its process; its disk stays. The roster still has it until `has_left`."""
        node.scope.cancel()

    @asynccontextmanager
    async def seed(self, own: Path | None = None) -> AsyncIterator[Placer]:
        """The seed's placer, while the block runs. Its home is the same each time. `own`: as of `Placer`."""
        transport = Libp2pTransport(KEY, ANY)
        async with trio.open_nursery() as nursery:
            await nursery.start(transport.serve, idle)
            placer = Placer(KEY, self.folder / "seed", transport, self.roster, Pacer(), own)
            nursery.start_soon(placer.run)
            yield placer
            nursery.cancel_scope.cancel()

    async def save_until(self, seed: Placer, content: bytes, step: int, condition: Callable[[], bool]) -> None:
        """Have `seed` save a state, and hang up once `condition` is true. The state must not be whole by then."""
        async with trio.open_nursery() as nursery:

            async def save() -> None:
                await seed.save(self.file(content), step, self.tell)
                raise AssertionError("it is whole")

            nursery.start_soon(save)
            await until(condition)
            nursery.cancel_scope.cancel()

    def counts(self) -> list[int]:
        """How many fragments each node has."""
        return [len(node.fragments) for node in self.nodes]

    def tell(self, stage: str, done: int, total: int) -> None:
        self.told.append((stage, done, total))

    def file(self, content: bytes) -> Path:
        path = self.folder / "optimizer.pt"
        path.write_bytes(content)
        return path


def as_kind(kind: type[Holder]) -> Callable[[Holder], Holder]:
    """For `Bench.add_node`."""
    return lambda made: kind(made._swarm, made._folder, made._replica, made._roster)


@asynccontextmanager
async def bench(folder: Path, nodes: int = 4, within_s: float = 60.0) -> AsyncIterator[Bench]:
    with trio.fail_after(within_s):
        async with trio.open_nursery() as nursery:
            made = Bench(folder, nursery)
            for _ in range(nodes):
                await made.add_node()
            yield made
            nursery.cancel_scope.cancel()
