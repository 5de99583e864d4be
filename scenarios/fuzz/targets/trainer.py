"""The trainer's socket at the seed: conversations with the real trainer server, rank groups, publisher and ledger.

A trainer is not hostile, but it may be broken or of another release. The seed must report that to it and keep running.
"""

import random
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any, ClassVar, Final, get_args

import msgspec
import trio
import trio.testing

import node.gateway
from codec import Chunk, Key, Layout, Manifest, Replica, TensorSpec
from codec.adapter import AdapterSlots
from codec.errors import PeerError, UsageError
from codec.parts import BASE, Part, extended, part_root
from node.coordinator.publisher import Attempt
from node.coordinator.trainer_server import TrainerServer
from node.ipc.channel import ChannelClosed
from node.ledger.book import Book
from node.ledger.service import LedgerService
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.status.schema import SeedStatus
from node.trainers.messages import PROTOCOL, Evict, Evicted, FromTrainer
from scenarios.fuzz.inputs.fields import Kind
from scenarios.fuzz.inputs.local import ScriptedChannel, frame, local_kinds
from scenarios.fuzz.inputs.scene import AUTHORITY
from scenarios.fuzz.tables import sizes_of
from scenarios.fuzz.target import Target, World
from swarm.runtime.replica.own import OwnChunk

__all__ = ["TrainerTarget"]

_BASE: Final = Layout((TensorSpec("a.weight", "BF16", (2, 4)), TensorSpec("b", "F32", (4,))))
_LAYOUT: Final = extended(_BASE, AdapterSlots.reserve(_BASE, 1, 1))


class _Records:
    """Replaces the seed's durable records."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def put(self, records: Iterable[tuple[str, bytes]], *, drop: Iterable[str] = ()) -> None:
        for name in drop:
            self.held.pop(name, None)
        self.held |= dict(records)

    def all(self, prefix: str = "") -> dict[str, bytes]:
        return {name: value for name, value in self.held.items() if name.startswith(prefix)}


class _Seed:
    """Replaces the coordinator behind the trainer server; it publishes nothing."""

    def __init__(self) -> None:
        self.replica = Replica.create(_LAYOUT)
        self.replica.rehash()
        self.key: Key = AUTHORITY
        self.head = (0, 3)
        self.tries = 0
        self.records = _Records()

    def coder(self) -> int:
        return 0

    async def find(self, root: bytes | None, version: int | None) -> Any:
        raise UsageError("This swarm has no such version.")

    async def open_attempt(self, back_to: Any = None, trainer_step: int | None = None, part: Part = BASE) -> Attempt:
        self.tries += 1
        return Attempt(0, 4, self.tries, self.replica.root, 0, 1)

    async def rewind(self, to: Any, skip: range = range(0)) -> AsyncGenerator[Any, None]:
        raise UsageError("Not enough of it is kept.")
        yield []

    async def add_chunk(self, chunk: Chunk, known: OwnChunk | None = None) -> None:
        await trio.lowlevel.checkpoint()

    async def seal(self, manifest: Manifest, parts: frozenset[Part]) -> bytes:
        await trio.lowlevel.checkpoint()
        return self.replica.root

    async def abandon(self) -> None:
        await trio.lowlevel.checkpoint()

    def status(self) -> SeedStatus:
        return SeedStatus()

    async def evict(self, request: Evict) -> Evicted:
        return Evicted(False, [])


class _NoGateway:
    """Replaces the gateway, which would listen on any address that a trainer names."""

    def __init__(self, *_: Any) -> None:
        return

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started("http://127.0.0.1:1/v1")
        await trio.sleep_forever()


async def _unsent(peer: bytes, body: bytes) -> None:
    return


_AFTER: Final = {
    "PublishBegin": ("Attach",),
    "PublishBlocks": ("Attach", "PublishBegin"),
    "PublishShared": ("Attach", "PublishBegin"),
    "PublishEnd": ("Attach", "PublishBegin"),
    "GoBack": ("Attach",),
    "Offer": ("OpenRollouts",),
    "Taken": ("OpenRollouts", "Offer"),
    "Accuse": ("OpenRollouts", "Offer"),
    "Stale": ("OpenRollouts", "Offer"),
    "Abort": ("OpenRollouts", "Offer"),
    "Trained": ("OpenRollouts", "Offer"),
}
"""By message, those that have to precede it."""


class _World(World):
    def __init__(self, rng: random.Random, kinds: dict[str, Kind]) -> None:
        self._kinds = kinds
        self.seed = _Seed()
        self.now = 0.0
        self.book = Book(Path(":memory:"))
        ledger = self.book.restore(Settings(), Head(0, 3, bytes(32)), 0.0)
        self.service = LedgerService(ledger, self.book, _unsent, clock=lambda: self.now)
        self.trainer_server = TrainerServer(self.seed, self.service)  # type: ignore[arg-type]
        self._gateway = node.gateway.Gateway
        node.gateway.Gateway = _NoGateway  # type: ignore[assignment, misc]

    def fitting(self, cls: type, value: Any) -> Any:
        """Make `value` a message that the seed accepts."""
        match cls.__name__:
            case "Attach":
                adapter = "a" if len(value["adapter"]) % 3 == 2 else ""
                own = {"rank": 0, "world": 1, "ring_bytes": 0}  # no descriptor comes with it
                return value | own | {"protocol": PROTOCOL, "part": "base", "adapter": adapter}
            case "PublishBegin":
                return value | {"again": None}
            case "PublishEnd":
                root = part_root(_LAYOUT, self.seed.replica.hashes, BASE)
                return value | {"blocks": [[0, _BASE.n_blocks]], "root": root, "changed": 0}
            case "PublishBlocks":
                return value | {"deltas": [[0, 2, bytes(32), bytes(16)]]}
            case "OpenRollouts":
                return value | {"keep": False, "n": 4}
        return value

    def give(self, kind: Kind, data: bytes) -> str:
        self.now += 1.0
        before = [self._kinds[name] for name in _AFTER.get(kind.name, ())]
        bodies = [msgspec.msgpack.encode(each.make(self)) for each in before]
        frames = [frame(body) for body in (*bodies, data)]
        frames.append(frame(msgspec.msgpack.encode(self._kinds["AskState"].make(self))))
        channel = ScriptedChannel(FromTrainer, frames)
        try:
            trio.run(self._converse, channel, clock=trio.testing.MockClock(autojump_threshold=0))
        except (ChannelClosed, PeerError) as error:  # `serve` handles these too
            return str(error)
        finally:
            channel.close()
        return " ".join(type(message).__name__ for message in channel.sent[-2:]) or "nothing"

    async def _converse(self, channel: Any) -> None:
        with trio.move_on_after(600):
            await self.trainer_server._converse(channel)
        self._write()

    def _write(self) -> None:
        """Do one turn of the ledger's task."""
        turn = self.service.begin_turn()
        if turn.facts:
            self.book.write(turn.facts)
        self.service.take_offers()
        self.service.tell_sessions(turn.ready)

    def check(self) -> None:
        assert not self.service._sessions, "a session outlived its trainer"
        self.service.status()

    def sizes(self) -> dict[str, int]:
        return sizes_of(self.trainer_server, "trainer_server")

    def close(self) -> None:
        node.gateway.Gateway = self._gateway  # type: ignore[misc]
        self.book.close()


class TrainerTarget(Target):
    """The target of this module."""

    name: ClassVar[str] = "trainer"
    about: ClassVar[str] = "the trainer's socket at the seed: whole conversations"
    slow_s: ClassVar[float] = 0.5
    """A message on a local socket may have 32 MiB."""
    episode: ClassVar[int] = 3000

    def __init__(self) -> None:
        self.kinds = local_kinds(FromTrainer)

    def world(self, rng: random.Random) -> World:
        return _World(rng, {kind.name: kind for kind in self.kinds})

    def types(self) -> dict[str, Any]:
        return {cls.__name__: cls for cls in get_args(FromTrainer)}
