"""The rollout worker: asks for work, runs it on the engine, signs and returns it, and brings new versions in.

It goes on through every failure of others: while the seed is away, results are sent again until a verdict or their
deadline; while the engine is away, work waits for it until its deadline; requests and results are repeated, because any
message may be lost.

A version is staged while the engine generates (see `engine_updater`), and committed so that the fewest tokens are lost:
a preemptible engine commits at once, after samples that would be refused as too old are cancelled; another engine
commits when its running sequences are done, and none is begun meanwhile.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from codec.errors import PeerError
from codec.sign import Key
from node.engines.base import Version
from node.engines.host import EngineFailed, EngineLost
from node.ledger.messages import (
    MAX_CAPACITY,
    Ask,
    AskAbilities,
    AskAdapters,
    AskReward,
    Cannot,
    Follow,
    GiveBack,
    ImagePart,
    JudgeRequest,
    Reason,
    Renewed,
    Timesheet,
    Unfit,
    Verdict,
    Withdraw,
    WorkLease,
    WorkMessage,
    WorkRequest,
    decode,
    encode,
)
from node.ledger.part_history import WHOLE, Change
from node.member.batch import Batch
from node.member.engine_client import EngineClient
from node.member.engine_facts import EngineFacts
from node.member.engine_updater import AdapterUpdate, EngineUpdater
from node.member.flight import Flight, divided
from node.member.held_version import HeldVersion
from node.member.image_queue import ImageQueue
from node.member.judge_queue import JudgeQueue
from node.member.lease_inventory import Held, Job, LeaseInventory, together
from node.member.pace import PACE, Pace
from node.member.rate_meter import RateMeter
from node.member.reward_queue import NO_REWARDS, RewardClient, RewardQueue
from node.member.rollout import prompt_of
from node.member.scorer import Scorer
from node.member.signing import Signing
from node.member.time_accounting import TimeAccounting
from node.member.token_stream import TokenStream
from node.settings.event_log import EventLog
from node.status.schema import TimeSplit, WorkerStatus
from swarm.guard import Source, guarded

__all__ = ["NodeWorker"]

COMMITS_TOLD: Final = 4
"""Versions in a timesheet; timesheets are sent more often than versions come."""
FEW: Final = 8
"""Work is asked for when this fraction (1 / FEW) of a batch has become free, or nothing waits."""

LOOK_EVERY_S: Final = 1.0
"""While the last leases are finished."""

_Asking = tuple[int, Version, bytes]
"""What a request for work says: room for sequences, the engine's version, and its root."""

_log = EventLog(__name__)


class NodeWorker:
    """The worker of one engine. `hear` gets bodies from the seed, `update` the versions that the replica became.
    `send(body)` hands a message to the seed, may lose it, must not wait for long, and never raises."""

    def __init__(
        self,
        key: Key,
        engine: EngineClient,
        send: Callable[[bytes], Awaitable[None]],
        pace: Pace = PACE,
        clock: Callable[[], float] = trio.current_time,
        rewards: RewardClient = NO_REWARDS,
    ) -> None:
        self._engine = engine
        self._send = send
        self._pace = pace
        self._clock = clock
        self._images = ImageQueue(lambda: self._inventory.unfinished_leases(), send, self._wake)
        self._inventory = LeaseInventory(self._images.has)
        self._flights: list[Flight] = []
        self._held = HeldVersion(engine)
        self._scorer = Scorer(engine, self._held, send)
        self._tokens = TokenStream(send)
        self._judge_queue = JudgeQueue(engine, self._held, send)
        self._rewards = RewardQueue(rewards, send)
        self._signing = Signing(key, self._inventory, self._rewards, clock, self._wake)
        self._updater = EngineUpdater(
            engine, self._held, clock,
            idle=self._until_idle, coming=self._coming, paused=self._paused, changed=self._changed,
        )  # fmt: skip
        self.batch = Batch(engine, pace)
        self._finishing = False
        """No more work is asked for."""
        self._resting = False
        """As `_finishing`, until `resume`."""
        self._behind = False
        """The ledger says that this engine's version is too old for the work there is."""
        self._facts = EngineFacts(engine, send, clock, lambda: rewards.abilities)
        self._news = trio.Event()
        self._serial = time.time_ns()
        """Of requests; rises over restarts of this process too. Only its order counts."""
        self._asked: _Asking | None = None
        self._asked_at = float("-inf")
        self.time_accounting = TimeAccounting(clock)
        self._rate = RateMeter(engine, self.time_accounting, pace, clock)
        self.commits = self._updater.commits
        self.accepted = 0
        self.lost_tokens = 0
        """Generated in vain: cancelled, too late or refused."""
        self.refused: dict[str, int] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Work until cancelled, then give back what is not finished."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._generate_for_ever, nursery)
                nursery.start_soon(self._updater.run)
                nursery.start_soon(self._talk_for_ever)
                nursery.start_soon(self._scorer.run)
                nursery.start_soon(self._judge_queue.run)
                nursery.start_soon(self._rewards.run)
                nursery.start_soon(self._tokens.run)
                nursery.start_soon(self._images.run)
                task_status.started()
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await self._give_back()

    async def finish(self, within_s: float) -> bool:
        """Ask for no more work, and wait until each lease is generated and judged, for at most `within_s`. Whether that
        came to be; `run`, when it is cancelled, gives the rest back."""
        self._finishing = True
        return await self._drained(within_s)

    async def rest(self, within_s: float) -> bool:
        """As `finish`, and give the rest back. Until `resume`, leases that still arrive are given back too."""
        self._resting = True
        drained = await self._drained(within_s)
        await self._give_back()
        return drained

    def resume(self) -> None:
        """Ask for work again, once the engine is ready."""
        self._resting = False
        self._wake()

    async def _drained(self, within_s: float) -> bool:
        self._wake()
        with trio.move_on_after(within_s):
            while self._inventory.leases or self._flights:
                news = self._news
                with trio.move_on_after(LOOK_EVERY_S):  # a lease that expires is no news
                    await news.wait()
            return True
        return False

    # ------------------------------------------------------------ from the swarm

    def hear(self, body: bytes) -> None:
        """A `Work` body from the seed, whose key is proven. An invalid one is logged and dropped."""
        with guarded(Source.WORK, "the seed"):
            self._hear(decode(body))
        self._wake()

    def update(
        self,
        version: Version,
        root: bytes,
        patch_fd: int | None,
        change: Change = WHOLE,
        base_root: bytes = b"",
        adapters: Sequence[AdapterUpdate] = (),
    ) -> None:
        """The replica became `version`, whose root over all parts is `root`; the engine follows. See
        `EngineUpdater.update`."""
        self._updater.update(version, root, patch_fd, change, base_root, adapters)
        self._book_time()

    def know(self, version: Version, root: bytes) -> None:
        """The engine is loaded from the replica at `version`, whose root over all parts is `root`."""
        self._held.know(version, root)

    @property
    def tokens_per_s(self) -> float:
        """See `RateMeter`."""
        return self._rate.tokens_per_s

    def status(self) -> WorkerStatus:
        """For people and programs."""
        seconds = {name: round(value, 3) for name, value in self.time_accounting.seconds.items()}
        return WorkerStatus(
            engine_ready=self._engine.ready,
            engine_version=self._held.version,
            tokens_per_s=round(self.tokens_per_s, 3),
            jobs=self._inventory.waiting,
            generating=self._rows,
            unanswered=len(self._inventory.results),
            accepted=self.accepted,
            refused=dict(self.refused),
            lost_tokens=self.lost_tokens,
            doing=self.time_accounting.state,
            seconds=TimeSplit(**seconds),
            useful=round(self._timesheet().useful, 4),
            worst_pause_s=max((commit.pause_s for commit in self.commits), default=0.0),
        )

    def _hear(self, message: WorkMessage) -> None:
        match message:
            case WorkLease():
                self._inventory.take(message, self._clock())
                self.batch.note_lease(len(message.samples))
                if message.sampling.extra.images:
                    self._images.look()
                self._behind = False
            case Verdict(lease, sample, refused):
                if (held := self._inventory.settle(lease, sample)) is not None:
                    self._count(held, sample, refused)
            case Withdraw(leases):
                for lease in leases:
                    self._drop(lease)
            case Follow(leases):
                self._tokens.follow(leases)
            case Renewed(lease, deadline_s):
                self._inventory.renewed(lease, deadline_s, self._clock())
            case Unfit(_, reason):
                self._behind = reason in (Reason.TOO_OLD, Reason.LATE)
                if not self._behind:
                    _log.warning("no_work", why=str(reason))
            case Ask():
                self._scorer.ask(message)
            case JudgeRequest():
                self._judge_queue.ask(message)
            case AskReward():
                self._rewards.ask(message)
            case ImagePart():
                self._images.hear(message)
            case AskAbilities():
                self._facts.ask()
            case AskAdapters():
                self._facts.ask_adapters()
            case _:
                raise PeerError(f"work message: {type(message).__name__} is not for a node")

    def _count(self, held: Held, sample: int, refused: str | None) -> None:
        if refused is None:
            self.accepted += 1
        else:
            self.refused[str(refused)] = self.refused.get(str(refused), 0) + 1
            self.lost_tokens += held.tokens.get(sample, 0)

    def _drop(self, lease: int) -> None:
        """Forget a lease that was withdrawn or has expired; cancel a flight that generates only such leases."""
        if self._inventory.drop(lease):
            for flight in self._flights:
                if all(other.id not in self._inventory.leases for other, _ in flight.jobs):
                    self._cancel(flight)

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()
        self._book_time()

    def _book_time(self) -> None:
        if self._resting and not self._flights:
            self.time_accounting.enter("wait_work")  # nobody waits for an engine that sleeps
        elif not self._engine.ready:
            self.time_accounting.enter("commit")
        elif self._flights:
            self.time_accounting.enter("generate")
        elif self._updater.taking:
            self.time_accounting.enter("commit")
        else:
            self.time_accounting.enter("wait_version" if self._behind else "wait_work")

    # ------------------------------------------------------------ generating

    @property
    def _rows(self) -> int:
        return sum(len(flight.jobs) for flight in self._flights)

    async def _generate_for_ever(self, nursery: trio.Nursery) -> None:
        await self._engine.wait_ready()
        await self._rate.test_self(self.batch.engines)
        self._wake()
        while True:
            if not self._engine.ready:
                self._book_time()
                await self._engine.wait_ready()
                self._wake()
            news = self._news
            while (jobs := self._next_jobs()) and self._engine.ready:
                for batch in divided(jobs, one_by_one=self._engine.continuous_batching):
                    flight = Flight(batch, self._held.begin())
                    self._flights.append(flight)
                    nursery.start_soon(self._fly, flight)
            self._book_time()
            with trio.move_on_after(self._pace.ask_every_s):  # deadlines pass without any event
                await news.wait()

    async def _fly(self, flight: Flight) -> None:
        try:
            with flight.scope:
                await self._generate(flight)
        except EngineLost as error:
            _log.warning("work_lost", sequences=len(flight.jobs), why=str(error))
            if not self._engine.ready:
                await self._give_back()  # an engine may take minutes to load; other nodes need not wait
            elif self._inventory.lose(flight.jobs):
                await self._return(flight)  # it may be what ends engines
        except EngineFailed as error:
            if flight.adapter and flight.adapter not in self._engine.adapters:
                await self._return(flight)
            else:
                await self._isolate(flight, str(error))
        finally:
            self._flights.remove(flight)
            self._wake()

    def _cancel(self, flight: Flight) -> None:
        flight.scope.cancel()
        self.lost_tokens += sum(held.tokens.pop(sample, 0) for held, sample in flight.jobs)

    async def _give_back(self) -> None:
        """Give all unfinished leases back, for other nodes."""
        leases = self._inventory.unfinished
        for lease in leases:
            self._drop(lease)
        if leases:
            await self._send(encode(GiveBack(leases)))

    async def _return(self, flight: Flight) -> None:
        """Give the leases of a flight back: the engine no longer has their adapter, and other nodes may."""
        leases = tuple(sorted({held.id for held, _ in flight.jobs}))
        for lease in leases:
            self._drop(lease)
        await self._send(encode(GiveBack(leases)))

    async def _isolate(self, flight: Flight, why: str) -> None:
        """The engine refused a batch: try its leases one by one, and report the one that is refused alone. Without that
        report the ledger would lease it again and again."""
        leases = list({held.id: held for held, _ in flight.jobs}.values())
        if len(leases) > 1:
            for held in leases:
                held.alone = True
            self._inventory.undo(flight.jobs)
            return
        held = leases[0]
        _log.warning("lease_refused", lease=held.id, why=why)
        self._drop(held.id)
        await self._send(encode(Cannot(held.id, held.message.token, why[:512])))

    def _next_jobs(self) -> list[Job]:
        """The samples to begin now."""
        if self._held.behind or ((self._updater.taking or self._flights) and not self._engine.preemptible):
            return []
        for lease in self._inventory.expired(self._clock()):
            self._drop(lease)
        return self._inventory.begin(self._held.version, self.batch.generated - self._rows)

    async def _generate(self, flight: Flight) -> None:
        jobs = together(flight.jobs)
        images = self._images.of(jobs[0][0].message.sampling)  # the samples of a flight are drawn alike
        prompts = [prompt_of(held, sample, images) for held, sample in jobs]

        def count(counts: tuple[int, ...]) -> None:
            for (held, sample), tokens in zip(jobs, counts, strict=True):
                self._rate.count(tokens - held.tokens.get(sample, 0))
                held.tokens[sample] = tokens

        sampling = jobs[0][0].message.sampling.with_options(adapter="", reward=None)
        more = {} if (draws := self._tokens.draws(jobs)) is None else {"draws": draws}
        completions, _ = await self._engine.generate(prompts, sampling, count, flight.adapter, **more)
        count(tuple(len(completion.token_ids) for completion in completions))
        self._rate.measure()
        for prompt, completion in zip(prompts, completions, strict=True):
            self.batch.note_finished(len(prompt.token_ids) + len(completion.token_ids))
        signed = [self._held.spans(completion.spans, flight.version) for completion in completions]
        for (held, sample), completion, spans in zip(jobs, completions, signed, strict=True):
            if spans is None:
                raise EngineLost("the engine was reloaded while it generated")
            self._signing.finish(held, sample, completion, spans)

    # ------------------------------------------------------------ new versions

    async def _until_idle(self) -> None:
        while self._flights:
            news = self._news
            await news.wait()
        self._book_time()

    def _coming(self, version: Version) -> None:
        """The engine gets `version` next. Cancel samples that were begun at a version which `max_lag` will not allow
        after it: they would be refused."""
        for flight in self._flights:
            lag = self._held.lag(flight.adapter, flight.version, version)
            if lag is None or all(lag > held.message.max_lag for held, _ in flight.jobs):
                self._inventory.undo(flight.jobs)  # to be generated again, at the new version
                self._cancel(flight)

    def _paused(self, seconds: float) -> None:
        if self._flights:
            self.time_accounting.correct(seconds)

    def _changed(self) -> None:
        self._behind = False
        self._wake()

    # ------------------------------------------------------------ messages

    async def _talk_for_ever(self) -> None:
        while True:
            news = self._news
            now = self._clock()
            for lease in self._inventory.expired(now):
                self._drop(lease)
            for result in [result for result in self._inventory.results.values() if result.next_send <= now]:
                result.next_send = now + self._pace.say_again_s
                for body in result.bodies:
                    await self._send(body)
            if self._resting and not self._engine.ready:
                await self._give_back()  # they were on their way when the last request for work was taken back
            for renewal in self._inventory.renewals(now, self._pace.renew_every_s):
                await self._send(encode(renewal))
            if self._engine.ready:
                await self._facts.tell()
            await self._ask_if_due()
            times = [result.next_send for result in self._inventory.results.values()]
            times.append(self._asked_at + self._pace.ask_every_s)
            if self._engine.ready:
                times.append(self._facts.next_s)
            if self._flights:
                times.append(now + self._pace.renew_every_s)
            with trio.move_on_after(max(0.0, min(times) - self._clock())):
                await news.wait()

    async def _ask_if_due(self) -> None:
        """Ask when the room, version or root has changed, and at least every `ask_every_s`."""
        now = self._clock()
        if not self._engine.ready or not self._rate.tested:
            self._asked_at = now
            return
        most = 0 if self._finishing or self._resting else self.batch.held
        capacity = max(0, most - self._inventory.waiting - self._rows)
        asking = (capacity, self._held.version, self._held.root)
        if now < self._asked_at + self._pace.ask_every_s and not self._is_news(asking):
            return
        self._asked, self._asked_at = asking, now
        self._serial += 1
        epoch, version = self._held.version
        holding = tuple(sorted(self._inventory.leases))[:MAX_CAPACITY]
        message = WorkRequest(self._serial, capacity, epoch, version, self._held.root, self.tokens_per_s, holding)
        await self._send(encode(message))
        await self._send(encode(self._timesheet()))

    def _is_news(self, asking: _Asking) -> bool:
        """Whether a request is due because of a change. While samples wait, room has to change by a part of a batch:
        samples that end one by one would otherwise cause a request each."""
        if self._asked is None or asking[1:] != self._asked[1:] or not self._inventory.waiting:
            return asking != self._asked
        return abs(asking[0] - self._asked[0]) >= max(1, self.batch.generated // FEW)

    def _timesheet(self) -> Timesheet:
        s = self.time_accounting.seconds
        commits = tuple(self.commits)[-COMMITS_TOLD:]
        return Timesheet(s["generate"], s["wait_work"], s["wait_version"], s["commit"], commits)
