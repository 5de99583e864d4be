"""A ledger and its nodes under trio's virtual clock, for scenarios with more nodes than fit on one machine.

The ledger's rules, book (in memory) and service are the product's, and so is each node's `NodeWorker` with its messages
and signatures. Modelled are the engines' time, a network with a delay, and a trainer that takes groups and publishes.
No weights are transferred: a version arrives `arrival_s` after its seal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, Literal

import trio
import trio.testing

from codec.sign import Key
from node.engines.base import Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, Counts
from node.engines.link import Draws
from node.ledger.binding import Binding
from node.ledger.book import Book
from node.ledger.packing import pack_tokens
from node.ledger.service import LedgerService
from node.ledger.session import WorkSession
from node.ledger.settings import Settings
from node.ledger.state import Head
from node.member.pace import Pace
from node.member.worker import NodeWorker
from scenarios.sim.virtual.engine import LOGPROB, STOP, ModelledEngine, empty_patch
from scenarios.sim.virtual.trio_time import one_order

__all__ = ["Engine", "Fault", "Kind", "LedgerSim", "Member", "Trainer", "virtually"]

Fault = Literal["killed", "stalled", "lying"]
INVENTED: Final = -3.0
"""The log-probability that a lying node reports for every token; honest nodes report `LOGPROB`."""
WIRE_S: Final = 0.05
"""One-way delay of a message."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of node: it generates `rows` sequences at once, each at `tokens_s` tokens per second. Completions have
    `mean` tokens on average."""

    tokens_s: float = 40.0
    rows: int = 32
    mean: int = 1000
    spread: float = 0.3
    arrival_s: float = 5.0
    stage_s: float = 2.0
    pause_s: float = 0.05


class Engine(ModelledEngine):
    """A modelled engine that also counts finished tokens, can hang, and can lie."""

    done: int = 0
    """Tokens of finished completions."""
    lies = False
    hung = False

    def __init__(self, kind: Kind, version: Version, root: bytes) -> None:
        super().__init__(
            kind.tokens_s,
            kind.mean,
            kind.spread,
            kind.stage_s,
            kind.pause_s,
            root,
            version,
            preemptible=True,
            scores=True,
        )

    @property
    def in_flight(self) -> int:
        """Tokens of unfinished completions."""
        return self.drawn - self._ended

    def hang(self) -> None:
        """From now on generate no token and apply no version."""
        self.hung = True
        self._position, self._since = self._now, None
        self._wake()

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        if self.hung:
            await trio.sleep_forever()
        taken = await super().commit(version, root)
        if self.hung:  # it began to hang during the commit
            self.hang()
        return taken

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[list[Completion], float]:
        completions, seconds = await super().generate(prompts, sampling, counts, adapter, draws)
        self.done += sum(len(completion.token_ids) for completion in completions)
        return [self._reported(completion) for completion in completions], seconds

    def _reported(self, true: Completion) -> Completion:
        if not self.lies:
            return true
        return Completion(true.token_ids, (INVENTED,) * len(true.token_ids), true.finish_reason, true.spans)

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]:
        return (LOGPROB,) * len(token_ids), self.version


@dataclass(eq=False)
class Member:
    """A node. The counters say what it had when its fault began: `drawing` counts tokens generated and not delivered;
    `delivered` counts delivered tokens of incomplete groups, or for a lying node of groups not handed over;
    `drawn_before` counts all tokens that a lying node had generated."""

    key: bytes
    kind: Kind
    engine: Engine
    worker: NodeWorker
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    fault: Fault | None = None
    drawn_before: int = 0
    drawing: int = 0
    delivered: int = 0


class LedgerSim:
    """One run: the ledger, its nodes, and the versions, whose roots are invented."""

    def __init__(self, nursery: trio.Nursery, settings: Settings, seed: int = 0) -> None:
        self.head = Head(0, 0, _root(0))
        self.members: dict[bytes, Member] = {}
        self._gone: set[bytes] = set()
        self._nursery = nursery
        self._numbers = count(1)
        self.book = Book(Path(":memory:"))
        self.ledger = self.book.restore(settings, self.head, trio.current_time(), seed.to_bytes(32, "little"))
        self.service = LedgerService(self.ledger, self.book, self._to_node, off_loop=_inline)

    async def hire(self, kind: Kind) -> Member:
        """Add a node whose engine holds the newest version."""
        key = Key(next(self._numbers).to_bytes(32, "little"))
        engine = Engine(kind, self.head.name, self.head.root)
        pace = Pace(capacity=2 * kind.rows, batch=kind.rows, self_test_tokens=0)
        member = Member(key.public, kind, engine, NodeWorker(key, engine, self._from_node(key.public), pace))
        self.members[key.public] = member
        self.service.member_up(key.public)

        async def live(task_status: trio.TaskStatus[None]) -> None:
            with member.scope:
                await member.worker.run(task_status=task_status)

        await self._nursery.start(live)
        return member

    def strike(self, member: Member, fault: Fault) -> None:
        """Let a node fail, without notifying any other."""
        member.fault = fault
        engine = member.engine
        undelivered = engine.done - self.ledger.nodes[member.key].tokens if member.key in self.ledger.nodes else 0
        member.drawing = engine.in_flight + max(0, undelivered)
        member.delivered = self._delivered(member)
        if fault == "lying":
            engine.lies, member.drawn_before = True, engine.drawn
        elif fault == "stalled":
            engine.hang()
        else:
            self._gone.add(member.key)
            member.scope.cancel()

    def _delivered(self, member: Member) -> int:
        """Count the tokens of its samples in incomplete groups, or for a lying node in groups not handed over."""
        return sum(
            len(done.rollout.token_ids) // 4
            for group in self.ledger.groups.values()
            if not (group.handed_over if member.fault == "lying" else group.complete)
            for done in group.done.values()
            if done.node == member.key
        )

    def drawing(self, member: Member) -> int:
        """Tokens that it was generating at its fault; for a lying node also all since then."""
        since = member.engine.drawn - member.drawn_before if member.fault == "lying" else 0
        return member.drawing + since

    @property
    def drawn(self) -> int:
        """Tokens that all engines have generated."""
        return sum(member.engine.drawn for member in self.members.values())

    @property
    def kept(self) -> int:
        """Of these, the tokens that wait for the trainer or that nodes without a fault are generating."""
        groups = self.ledger.groups.values()
        done = sum(len(done.rollout.token_ids) // 4 for group in groups for done in group.done.values())
        return done + sum(m.engine.in_flight for m in self.members.values() if m.fault is None)

    def seal_after(self, seconds: float) -> None:
        """Publish a version that is sealed `seconds` later."""

        async def later() -> None:
            await trio.sleep(seconds)
            await self.seal()

        self._nursery.start_soon(later)

    async def seal(self) -> None:
        """Publish and seal a version; each engine gets it `arrival_s` later."""
        version = self.head.version + 1
        self.head = Head(0, version, _root(version))
        self.service.sealed(self.head)
        for member in list(self.members.values()):
            self._nursery.start_soon(self._arrive, member, self.head)

    async def _arrive(self, member: Member, head: Head) -> None:
        await trio.sleep(member.kind.arrival_s)
        if member.key not in self._gone and head.name > member.engine.version:
            member.worker.update(head.name, head.root, empty_patch())

    async def _to_node(self, node: bytes, body: bytes) -> None:
        self._nursery.start_soon(self._carry, node, lambda: self.members[node].worker.hear(body))

    def _from_node(self, node: bytes) -> Any:
        async def send(body: bytes) -> None:
            if node not in self._gone:
                self._nursery.start_soon(self._carry, node, lambda: self.service.hear(node, body))

        return send

    async def _carry(self, node: bytes, deliver: Callable[[], None]) -> None:
        await trio.sleep(WIRE_S)
        if node not in self._gone:
            deliver()


class Trainer:
    """Takes `groups` complete groups in each step, computes for `train_s`, and publishes; one step ahead by default.

    The version is sealed `seal_s` later, while the trainer already gathers its next groups. Like the iterator of
    `Swarm.rollouts`, it reports a group as taken when it asks for the next one. With `paced` False the ledger does not
    limit samples by the trainer's consumption."""

    def __init__(
        self,
        ledger_sim: LedgerSim,
        groups: int,
        n: int,
        *,
        train_s: float,
        max_tokens: int,
        max_lag: int = 1,
        seal_s: float = 0.0,
        paced: bool = True,
    ) -> None:
        self.ledger_sim, self._groups, self._train_s, self._seal_s = ledger_sim, groups, train_s, seal_s
        sampling = SamplingParams(max_tokens, stop_tokens=(STOP,))
        self.session: WorkSession = ledger_sim.service.open("run", Binding(n, sampling, max_lag), paced=paced)
        self._unconfirmed: bytes | None = None
        """The group that it got last and has not yet reported as taken."""
        self._offered_at: dict[bytes, tuple[float, int]] = {}
        """When each group was offered, and in which step."""
        self.steps = 0
        self.waits_s: list[float] = []
        """Time from a group's offer until the trainer got it."""
        self.worst_lag = 0
        """The most versions that any token was behind the newest sealed version when the trainer got it."""
        self.waits_steps: list[int] = []
        """`waits_s` in steps."""
        self._numbers = count()
        self._offered = 0
        self.taken_tokens = 0
        self.invented = 0
        """Samples of lying nodes that were trained on."""
        self.taken = 0

    async def step(self) -> float:
        """Run one step. Returns its seconds, training included."""
        began = trio.current_time()
        got = 0
        while got < self._groups:
            news = self.session.news
            got += self._exchange(self._groups - got)
            if got < self._groups:
                await news.wait()
        await trio.sleep(self._train_s)
        self.steps += 1
        if self._seal_s:
            self.ledger_sim.seal_after(self._seal_s)
        else:
            await self.ledger_sim.seal()
        return trio.current_time() - began

    def _exchange(self, wanted: int) -> int:
        service, session = self.ledger_sim.service, self.session
        taken = 0
        while (session.groups or self._unconfirmed) and taken < wanted:
            if self._unconfirmed is not None:
                service.taken(self._unconfirmed)
                self._unconfirmed = None
                continue
            group = session.groups.popleft()
            self._unconfirmed = group.id
            oldest = min(done.oldest for done in group.done.values())
            self.worst_lag = max(self.worst_lag, self.ledger_sim.head.version - oldest[1])
            at, step = self._offered_at.pop(group.id)
            self.waits_s.append(trio.current_time() - at)
            self.waits_steps.append(self.steps - step)
            self.taken_tokens += sum(len(done.rollout.token_ids) // 4 for done in group.done.values())
            self.invented += sum(self.ledger_sim.members[done.node].engine.lies for done in group.done.values())
            self.taken += group.n
            taken += 1
        while self._offered < session.allowed:
            number = next(self._numbers)
            name = number.to_bytes(16, "little")
            self._offered_at[name] = (trio.current_time(), self.steps)
            service.offer(session, name, pack_tokens((1, 2, 3 + number % 1000)))
            self._offered += 1
        return taken


def virtually(main: Callable[..., Any], *args: Any) -> Any:
    """Run an async function in virtual time, with a repeatable order of tasks."""
    with one_order():
        return trio.run(main, *args, clock=trio.testing.MockClock(autojump_threshold=0))


def _root(version: int) -> bytes:
    return version.to_bytes(32, "little")


async def _inline(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` here: virtual time would not wait for a thread."""
    return function(*args)
