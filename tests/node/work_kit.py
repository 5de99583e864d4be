"""A ledger service and node workers connected directly, under trio's virtual clock, with engines that only take
time."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from codec.sign import Key
from node.engines.base import Completion, SamplingParams, Span
from node.engines.host import Commitment, EngineFailed, EngineLost
from node.engines.room import NO_ROOM_TOLD
from node.ledger.book import Book
from node.ledger.packing import pack_tokens
from node.ledger.service import LedgerService
from node.ledger.session import WorkSession
from node.ledger.settings import Settings
from node.ledger.state import Group, Head
from node.member.pace import Pace
from node.member.reward_queue import NO_REWARDS, RewardClient
from node.member.worker import NodeWorker

SAMPLING = SamplingParams(max_tokens=100, stop_tokens=(2,))
TOKENS = 50


def root(version: int) -> bytes:
    return version.to_bytes(4, "big") * 8


def head(version: int) -> Head:
    return Head(0, version, root(version))


async def inline(function, *args):
    """Run the function here instead of in a thread, for which the virtual clock would not wait."""
    return function(*args)


class TimedEngine:
    """Generates `rate` tokens per second. Its completions record the version."""

    def __init__(self, rate: float, version: int = 0) -> None:
        self.rate = rate
        self.version, self.root = (0, version), root(version)
        self.up = trio.Event()
        self.up.set()
        self.staged: tuple[int, int] | None = None
        self.generating = False
        self.fail_next = False
        self.committed: list[tuple[int, int]] = []
        self.stage_s = 0.5
        self.preemptible, self.continuous_batching, self.scores = False, False, True
        self.abilities, self.kind = frozenset[str](), "timed"
        self.room = NO_ROOM_TOLD
        self.adapters: dict[str, tuple[int, int]] = {}

    @property
    def ready(self) -> bool:
        return self.up.is_set()

    async def wait_ready(self) -> None:
        await self.up.wait()

    wait_up = wait_ready

    def lacks(self, version: tuple[int, int]) -> bool:
        return self.version < version

    async def score(self, prompt, token_ids, sampling, adapter=""):
        return (-1.0,) * len(token_ids), self.version

    async def judge(self, claim):
        raise AssertionError("it does not name the ability JUDGES")

    async def generate(self, prompts: Sequence, sampling, counts=None, adapter="") -> tuple[list[Completion], float]:
        if any(p.token_ids[-1] == 666 for p in prompts):
            raise EngineFailed("prompt: a token id outside 0 to 600", poisoned=False)
        self.generating = True
        before, version = trio.current_time(), self.version
        await trio.sleep(len(prompts) * TOKENS / self.rate)
        self.generating = False
        assert self.version == version, "a commit during a batch"
        if self.fail_next:
            self.fail_next = False
            raise EngineLost("gone")
        tokens = (*range(10, 10 + TOKENS - 2),)
        completions = [
            Completion((*tokens, p.stream % (1 << 31) + 3, 2), (-1.0,) * TOKENS, "stop", (Span(version, 0, TOKENS),))
            for p in prompts
        ]
        return completions, trio.current_time() - before

    async def stage(self, patch_fd: int, version: tuple[int, int]) -> float:
        await trio.sleep(self.stage_s)
        self.staged = version
        return self.stage_s

    async def commit(self, version: tuple[int, int], new_root: bytes) -> Commitment | None:
        assert not self.generating, "a commit during a batch"
        assert self.staged == version
        self.version, self.root, self.staged = version, new_root, None
        self.committed.append(version)
        return Commitment(0.01)


class Wire:
    """Carries messages between one service and many workers, with delay, loss and cut connections."""

    def __init__(self, nursery: trio.Nursery, delay_s: float = 0.05, loss: float = 0.0) -> None:
        self.nursery, self.delay_s, self.loss = nursery, delay_s, loss
        self.random = random.Random(7)
        self.service: LedgerService | None = None
        self.workers: dict[bytes, NodeWorker] = {}
        self.cut: set[bytes] = set()
        self.bodies: list[tuple[bytes, bytes]] = []

    async def to_node(self, node: bytes, body: bytes) -> None:
        if self.random.random() >= self.loss and node not in self.cut:
            self.nursery.start_soon(self._deliver_down, node, body)

    def from_node(self, node: bytes):
        async def send(body: bytes) -> None:
            if self.random.random() >= self.loss and node not in self.cut:
                self.nursery.start_soon(self._deliver_up, node, body)

        return send

    async def _deliver_down(self, node: bytes, body: bytes) -> None:
        await trio.sleep(self.delay_s)
        if node in self.workers and node not in self.cut:
            self.workers[node].hear(body)

    async def _deliver_up(self, node: bytes, body: bytes) -> None:
        await trio.sleep(self.delay_s)
        if self.service is not None and node not in self.cut:
            self.bodies.append((node, body))
            self.service.hear(node, body)


class Swarm:
    """A ledger service with its nodes."""

    def __init__(self, folder: Path, nursery: trio.Nursery, **wire: float) -> None:
        self.path = folder / "ledger.sqlite"
        self.nursery = nursery
        self.wire = Wire(nursery, **wire)
        self.head = head(0)
        self.engines: dict[bytes, Any] = {}
        self.lives: dict[bytes, trio.CancelScope] = {}
        self.life = trio.CancelScope()
        self.settings = Settings(min_deadline_s=20.0, max_deadline_s=300.0)

    async def start_service(self) -> LedgerService:
        self.book = Book(self.path)
        ledger = self.book.restore(self.settings, self.head, trio.current_time())
        service = LedgerService(ledger, self.book, self.wire.to_node, off_loop=inline)
        self.life = trio.CancelScope()

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with self.life:
                await service.run(task_status=task_status)

        await self.nursery.start(live)
        self.wire.service = self.service = service
        return service

    def kill_service(self) -> None:
        self.life.cancel()
        self.wire.service = None
        self.book.close()

    async def add_node(
        self, i: int, rate: float, version: int = 0, engine: Any = None, rewards: RewardClient = NO_REWARDS,
        **pace: float,
    ) -> Any:  # fmt: skip
        key = Key(bytes([i]) * 32)
        engine = engine or TimedEngine(rate, version)
        self.engines[key.public] = engine
        pace = Pace(**({"self_test_tokens": 0} | pace))
        worker = NodeWorker(key, engine, self.wire.from_node(key.public), pace, rewards=rewards)
        self.wire.workers[key.public] = worker
        self.lives[key.public] = scope = trio.CancelScope()

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with scope:
                await worker.run(task_status=task_status)

        await self.nursery.start(live)
        return engine

    def kill_node(self, i: int, *, known: bool) -> None:
        node = Key(bytes([i]) * 32).public
        self.wire.cut.add(node)  # a killed process sends nothing more
        self.lives[node].cancel()
        if known:
            self.service.member_lost(node)

    def worker(self, i: int) -> NodeWorker:
        return self.wire.workers[Key(bytes([i]) * 32).public]


def gid(i: int) -> bytes:
    return i.to_bytes(16, "big")


async def collect(
    service: LedgerService, session: WorkSession, count: int, *, first: int = 0, offers: int | None = None
):
    """Offer groups as the session allows, and take complete ones. Returns `count` groups."""
    got: list[Group] = []
    offered = 0
    offers = count if offers is None else offers
    while len(got) < count:
        news = session.news
        while offered < min(offers, session.allowed):
            service.offer(session, gid(first + offered), pack_tokens((1, 2, offered)))
            offered += 1
        while session.groups:
            group = session.groups.popleft()
            got.append(group)
            service.taken(group.id)
        if len(got) < count:
            with trio.fail_after(1000.0):
                await news.wait()
    return got
