"""The node's working life: ask for work, run it on the engine, sign and return it, take new versions in between.

Everything that can go wrong is somebody else's decision: the seed may be away (results are said again until a verdict
or their deadline), the engine may be away (work waits for it until its deadline), messages may be lost either way
(requests and results are repeated). A version is staged while the engine generates and committed between two batches.
"""

import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from codec.errors import PeerError
from codec.sign import Key
from node.engines.base import Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, EngineFailed, EngineLost
from node.ledger.messages import (
    Cannot,
    GiveBack,
    Renewed,
    Rollout,
    SignedRollout,
    Unfit,
    Verdict,
    VersionSpan,
    Withdraw,
    WorkLease,
    WorkMessage,
    WorkRequest,
    decode,
    encode,
    pack_floats,
    pack_tokens,
    seal_rollout,
    stream_of,
    unpack_tokens,
    work_hash,
)

__all__ = ["EngineSeat", "NodeWorker", "Pace"]

_log = logging.getLogger(__name__)


class EngineSeat(Protocol):
    """What the worker asks of an engine; `node.engines.host.EngineHost` is one."""

    version: Version
    root: bytes

    @property
    def ready(self) -> bool: ...

    async def wait_ready(self) -> None: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams
    ) -> tuple[Sequence[Completion], float]: ...

    async def stage(self, patch_fd: int, version: Version) -> float: ...

    async def commit(self, version: Version, root: bytes) -> Commitment | None: ...


@dataclass(frozen=True, slots=True)
class Pace:
    """How a node works."""

    capacity: int = 64
    """Sequences taken at a time: what is held, generating or waiting."""
    batch: int = 32
    """Sequences generated at once. A commit waits for a batch, so a large one delays versions; a small one is slow."""
    ask_every_s: float = 5.0
    """A request for work is repeated this often, in case it was lost or the seed restarted."""
    say_again_s: float = 3.0
    """A result without a verdict is sent again after this: several round trips of the longest links."""
    memory_s: float = 60.0
    """The rate told to the ledger forgets over this time."""


@dataclass(slots=True)
class _Job:
    """One sample to generate. `deadline`: by our clock, counted from the lease's arrival."""

    lease: WorkLease
    sample: int
    deadline: float
    prompt: tuple[int, ...]
    alone: bool = False
    """The engine refused a batch with it: it is tried by itself."""


@dataclass(slots=True)
class _Result:
    body: bytes
    deadline: float
    next_send: float


@dataclass(frozen=True, slots=True)
class _Update:
    """A version that the replica holds, for the engine to follow. `patch_fd`: ours to close."""

    version: Version
    root: bytes
    patch_fd: int


class NodeWorker:
    """One engine's work. The swarm's shell feeds `hear` (bodies from the seed) and `update` (versions committed to the
    replica); `send(body)` takes a message to the seed, may lose it, must not wait for long, and never raises."""

    def __init__(
        self,
        key: Key,
        engine: EngineSeat,
        send: Callable[[bytes], Awaitable[None]],
        pace: Pace = Pace(),
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._key = key
        self._engine = engine
        self._send = send
        self._pace = pace
        self._clock = clock
        self._jobs: deque[_Job] = deque()
        self._running: list[_Job] = []
        self._results: dict[tuple[int, int], _Result] = {}
        self._updates: deque[_Update] = deque()
        self._staged: _Update | None = None
        self._between = trio.Lock()
        """Held while the engine generates, or commits."""
        self._news = trio.Event()
        self._serial = time.time_ns()
        """Of requests: must also rise over our own restarts, and nobody but us compares it with anything."""
        self._asked: tuple[Any, ...] | None = None
        self._asked_at = float("-inf")
        self._roots: OrderedDict[Version, bytes] = OrderedDict()
        self.tokens_per_s = 0.0
        self._measured_s = 0.0
        self.seconds = {"generate": 0.0, "wait_for_work": 0.0, "commit": 0.0}
        self.worst_pause_s = 0.0
        self.commits: deque[tuple[Version, float]] = deque(maxlen=256)
        """The last versions committed, with the pause of each in seconds."""
        self.accepted = 0
        self.refused: dict[str, int] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Work until cancelled; then what was not finished is given back."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._generate_for_ever)
                nursery.start_soon(self._stage_for_ever)
                nursery.start_soon(self._talk_for_ever)
                task_status.started()
        finally:
            self._close_updates()
            with trio.CancelScope(shield=True), trio.move_on_after(2.0):
                await self._give_back()

    # ------------------------------------------------------------ from the swarm

    def hear(self, body: bytes) -> None:
        """A `Work` body from the seed (its key proven). What makes no sense is logged and dropped."""
        try:
            self._hear(decode(body))
        except PeerError as error:
            _log.warning("work message from the seed dropped: %s", error)
        self._wake()

    def update(self, version: Version, root: bytes, patch_fd: int) -> None:
        """The replica became `version`; the engine follows. Takes over `patch_fd` (see `codec.write_patch`)."""
        self._updates.append(_Update(version, root, patch_fd))
        self._wake()

    def state(self) -> dict[str, Any]:
        """Plain values, for people and programs."""
        return {
            "engine_ready": self._engine.ready,
            "engine_version": list(self._engine.version),
            "tokens_per_s": round(self.tokens_per_s, 3),
            "jobs": len(self._jobs),
            "generating": len(self._running),
            "unanswered": len(self._results),
            "accepted": self.accepted,
            "refused": dict(self.refused),
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "worst_pause_s": self.worst_pause_s,
        }

    def _hear(self, message: WorkMessage) -> None:
        match message:
            case WorkLease():
                self._take(message)
            case Verdict(lease, sample, refused):
                if self._results.pop((lease, sample), None) is not None:
                    self._count(refused)
            case Withdraw(leases):
                gone = set(leases)
                self._jobs = deque(job for job in self._jobs if job.lease.lease not in gone)
                self._results = {key: result for key, result in self._results.items() if key[0] not in gone}
            case Renewed():
                pass  # asked for by nobody yet
            case Unfit(_, reason):
                _log.warning("the ledger gives this node no work: %s", reason)
            case _:
                raise PeerError(f"work message: {type(message).__name__} is not for a node")

    def _take(self, lease: WorkLease) -> None:
        """A lease that is known already (it was thought lost, and sent again) changes nothing."""
        known = {job.lease.lease for job in (*self._jobs, *self._running)} | {key[0] for key in self._results}
        if lease.lease in known:
            return
        prompt = unpack_tokens(lease.prompt)
        if not prompt:
            raise PeerError("lease.prompt: empty")
        deadline = self._clock() + lease.deadline_s
        self._jobs.extend(_Job(lease, sample, deadline, prompt) for sample in lease.samples)

    def _count(self, refused: str | None) -> None:
        if refused is None:
            self.accepted += 1
        else:
            self.refused[str(refused)] = self.refused.get(str(refused), 0) + 1

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()

    # ------------------------------------------------------------ generating

    async def _generate_for_ever(self) -> None:
        while True:
            news = self._news
            await self._engine.wait_ready()
            await self._commit_if_staged()
            batch = self._next_batch()
            if not batch:
                started = self._clock()
                with trio.move_on_after(self._pace.ask_every_s):  # deadlines pass without news, too
                    await news.wait()
                self.seconds["wait_for_work"] += self._clock() - started
                continue
            try:
                async with self._between:
                    await self._generate(batch)
            except EngineLost as error:
                _log.warning("%d sequences lost with the engine: %s", len(batch), error)
                await self._give_back()  # an engine may take minutes to load; others need not wait
            except EngineFailed as error:
                await self._isolate(batch, str(error))
            self._running = []  # not when cancelled: `run` gives it back

    async def _give_back(self) -> None:
        leases = tuple(sorted({job.lease.lease for job in (*self._jobs, *self._running)}))
        self._jobs.clear()
        self._running = []
        if leases:
            await self._send(encode(GiveBack(leases)))

    async def _isolate(self, batch: list[_Job], why: str) -> None:
        """The engine refused a batch: find out whose fault it was, and say so, or it would come back for ever."""
        if len(batch) > 1:
            for job in batch:
                job.alone = True
            self._jobs.extendleft(reversed(batch))
            return
        lease = batch[0].lease
        _log.warning("the engine refuses lease %d: %s", lease.lease, why)
        self._jobs = deque(job for job in self._jobs if job.lease.lease != lease.lease)
        await self._send(encode(Cannot(lease.lease, lease.token, why[:512])))

    def _next_batch(self) -> list[_Job]:
        """The next jobs of equal sampling, oldest first, that are still in time and fit the engine's version."""
        now = self._clock()
        self._jobs = deque(job for job in self._jobs if job.deadline > now)
        fit = [job for job in self._jobs if (job.lease.epoch, job.lease.version) <= self._engine.version]
        batch = [job for job in fit if job.lease.sampling == fit[0].lease.sampling][: self._pace.batch]
        if batch and any(job.alone for job in batch):
            batch = batch[:1]
        chosen = {id(job) for job in batch}
        self._jobs = deque(job for job in self._jobs if id(job) not in chosen)
        self._running = batch
        return batch

    async def _generate(self, batch: list[_Job]) -> None:
        self._know(self._engine.version, self._engine.root)
        prompts = [Prompt(job.prompt, stream_of(job.lease.group, job.sample)) for job in batch]
        completions, seconds = await self._engine.generate(prompts, batch[0].lease.sampling)
        self._measure(sum(len(completion.token_ids) for completion in completions), seconds)
        now = self._clock()
        for job, completion in zip(batch, completions, strict=True):
            sealed = seal_rollout(self._key, self._rollout(job, completion))
            key = (job.lease.lease, job.sample)
            self._results[key] = _Result(encode(SignedRollout(sealed)), job.deadline, now)
        self._wake()

    def _rollout(self, job: _Job, completion: Completion) -> Rollout:
        lease = job.lease
        spans = [VersionSpan(*span.version, self._roots[span.version], span.end) for span in completion.spans]
        return Rollout(
            lease=lease.lease,
            token=lease.token,
            sample=job.sample,
            work=work_hash(lease.group, job.sample, lease.prompt, lease.sampling),
            token_ids=pack_tokens(completion.token_ids),
            logprobs=pack_floats(completion.logprobs),
            finish_reason=completion.finish_reason,
            spans=tuple(spans),
        )

    def _know(self, version: Version, root: bytes) -> None:
        self._roots[version] = root
        self._roots.move_to_end(version)
        while len(self._roots) > 64:
            self._roots.popitem(last=False)

    def _measure(self, tokens: int, seconds: float) -> None:
        self.seconds["generate"] += seconds
        if seconds > 0:
            self._measured_s = min(self._measured_s + seconds, self._pace.memory_s)
            self.tokens_per_s += (seconds / max(self._measured_s, seconds)) * (tokens / seconds - self.tokens_per_s)

    # ------------------------------------------------------------ new versions

    async def _stage_for_ever(self) -> None:
        """Stage the next version while the engine generates; whoever is between two batches commits it."""
        while True:
            news = self._news
            if self._staged is not None or not self._updates:
                await news.wait()
                continue
            await self._engine.wait_ready()
            update = self._updates.popleft()
            if update.version <= self._engine.version:  # the engine was reloaded meanwhile, and is past it
                os.close(update.patch_fd)
                continue
            try:
                await self._engine.stage(update.patch_fd, update.version)
            except (EngineLost, EngineFailed) as error:
                _log.warning("version %s was not staged: %s", update.version, error)
            finally:
                os.close(update.patch_fd)
            # Staged or not: the commit of what is not staged fails, and the engine is reloaded from the replica.
            self._staged = update
            if not self._running:
                await self._commit_if_staged()
            self._wake()

    async def _commit_if_staged(self) -> None:
        async with self._between:
            update, self._staged = self._staged, None
            if update is not None and update.version > self._engine.version:
                await self._commit(update)
        if update is not None:
            self._wake()  # the next may be staged

    async def _commit(self, update: _Update) -> None:
        started = self._clock()
        try:
            took = await self._engine.commit(update.version, update.root)
        except (EngineLost, EngineFailed) as error:
            _log.warning("version %s was not committed: %s", update.version, error)
            return
        self.seconds["commit"] += self._clock() - started
        if took is not None:
            self.worst_pause_s = max(self.worst_pause_s, took.pause_s)
            self.commits.append((update.version, took.pause_s))

    def _close_updates(self) -> None:
        while self._updates:
            os.close(self._updates.popleft().patch_fd)

    # ------------------------------------------------------------ talking

    async def _talk_for_ever(self) -> None:
        while True:
            news = self._news
            now = self._clock()
            self._results = {key: result for key, result in self._results.items() if result.deadline > now}
            for result in [result for result in self._results.values() if result.next_send <= now]:
                result.next_send = now + self._pace.say_again_s
                await self._send(result.body)
            await self._ask_if_due()
            times = [result.next_send for result in self._results.values()] + [self._asked_at + self._pace.ask_every_s]
            with trio.move_on_after(max(0.0, min(times) - self._clock())):
                await news.wait()

    async def _ask_if_due(self) -> None:
        """Ask when what we could take has changed, and every few seconds all the same."""
        if not self._engine.ready:
            self._asked_at = self._clock()
            return
        held = (*self._jobs, *self._running)
        capacity = max(0, self._pace.capacity - len(held))
        holding = tuple(sorted({job.lease.lease for job in held} | {lease for lease, _ in self._results}))
        asking = (capacity, self._engine.version, self._engine.root)
        if asking == self._asked and self._clock() < self._asked_at + self._pace.ask_every_s:
            return
        self._asked, self._asked_at = asking, self._clock()
        self._serial += 1
        epoch, version = self._engine.version
        message = WorkRequest(self._serial, capacity, epoch, version, self._engine.root, self.tokens_per_s, holding)
        await self._send(encode(message))
