"""Several engines of one node, used as one: each generates at its own rate and commits each version by itself.

The group's version is the newest that any of its engines has proven, and only engines at that version get work: an
engine that is a version behind, or loads its weights, gets none until it has caught up, and delays no other. An engine
that does not answer for long is left behind: the next versions go to the others, and it is filled from the replica
when it answers, or when it was started again.
"""

import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeVar

import trio

from codec.adapter import AdapterConfig
from codec.errors import UsageError
from node.engines.base import BASE_VERSION, REPLAYS, Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, Counts, EngineFailed, EngineHost, EngineLost
from node.engines.judgement import Claim, Judgement
from node.engines.link import Draws
from node.engines.room import Room, together
from node.settings.event_log import EventLog
from node.verification.classes import PREFIX, in_format

__all__ = ["EngineGroup", "GroupedEngine"]

LATE_S: Final = 5.0
"""An engine that has not answered this long after the first one of the group, or `LATE_TIMES` as long after it as that
took, is left behind. Engines of one machine differ by their running sequences, not by minutes."""
LATE_TIMES: Final = 4.0
LOOK_EVERY_S: Final = 1.0
"""A reload that an engine needed by itself is seen after this time."""

AnswerT = TypeVar("AnswerT")

_log = EventLog(__name__)


@dataclass(eq=False)
class GroupedEngine:
    """One engine of a group. `number`: 1, 2, ... `devices`: names of its GPUs. `url`: of its OpenAI endpoint, if it has
    one. `sequences`: what it generates at the moment."""

    host: EngineHost
    number: int = 1
    url: str = ""
    devices: tuple[str, ...] = ()
    sequences: int = 0
    running: set[trio.CancelScope] = field(default_factory=set)
    """Of the calls that generate these."""
    heard_at: float = -math.inf
    """When it told of its sequences last, by trio's clock."""
    late: bool = False
    """It was left behind, and gets no version before it was filled from the replica."""
    filling: bool = False
    """It was not ready when the others got a version, and may be loading an older one."""
    out: str = ""
    """Why it was given up: it cannot be started, or refuses the model; empty: it was not."""


class EngineGroup:
    """An engine client of one or more hosts. `run` must be running while versions are given to it."""

    def __init__(self, hosts: Sequence[EngineHost] = (), form: str = "") -> None:
        """`hosts`: all of them; none: `use` names them before `run`. `form`: the format (`codec.formats`) whose codes
        the weights stand for; empty: they are the base's."""
        self._form = form
        self._changed = trio.Event()
        self._rounds: trio.Nursery | None = None
        """Where requests to several engines run: one that is left behind outlives the call."""
        self._wanted: Version = BASE_VERSION
        """The newest version that the group was to take."""
        self._adapters: dict[str, Version] = {}
        """By name: the newest version that any engine has proven."""
        self.engines: tuple[GroupedEngine, ...] = ()
        self.use([GroupedEngine(host, number) for number, host in enumerate(hosts, 1)])

    def use(self, engines: Sequence[GroupedEngine]) -> None:
        """These are the engines; called once, before `run`."""
        self.engines = tuple(engines)
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    @property
    def hosts(self) -> tuple[EngineHost, ...]:
        return tuple(engine.host for engine in self.engines)

    @property
    def _up(self) -> list[GroupedEngine]:
        return [engine for engine in self.engines if engine.host.ready]

    def _current(self, adapter: str = "") -> list[GroupedEngine]:
        """Those that may generate: ready, at the group's version, and with the adapter's newest version."""
        head = self.version
        found = [engine for engine in self._up if engine.host.version == head]
        if not adapter:
            return found
        holding = [engine for engine in found if adapter in engine.host.adapters]
        newest = max((engine.host.adapters[adapter] for engine in holding), default=BASE_VERSION)
        newest = max(newest, self._adapters.get(adapter, newest))
        return [engine for engine in holding if engine.host.adapters[adapter] == newest]

    @property
    def version(self) -> Version:
        """The newest version that an engine has held, proven; also while that engine is away."""
        return max((engine.host.version for engine in self.engines), default=BASE_VERSION)

    @property
    def root(self) -> bytes:
        """Of `version`."""
        newest = max(self.engines, key=lambda engine: engine.host.version, default=None)
        return b"" if newest is None else newest.host.root

    def lacks(self, version: Version) -> bool:
        """Some engine that takes versions is older than `version`."""
        return bool(self._behind(version))

    def _behind(self, version: Version) -> list[GroupedEngine]:
        return [engine for engine in self._up if not engine.late and engine.host.version < version]

    @property
    def preemptible(self) -> bool:
        return all(host.preemptible for host in self.hosts)

    @property
    def continuous_batching(self) -> bool:
        return all(host.continuous_batching for host in self.hosts)

    @property
    def room(self) -> Room:
        return together([host.room for host in self.hosts])

    @property
    def scores(self) -> bool:
        return any(engine.host.scores for engine in self._current())

    @property
    def abilities(self) -> frozenset[str]:
        """Those that every ready host has. Hosts of several arithmetic classes promise no bits together."""
        named = [engine.host.abilities for engine in self._up or self.engines]
        if not named:
            return frozenset()
        classes = {name for abilities in named for name in abilities if name.startswith(PREFIX)}
        found = in_format(frozenset.intersection(*named), self._form)
        return found if len(classes) < 2 else found - {REPLAYS}

    @property
    def kind(self) -> str:
        return "+".join(sorted({host.kind for host in self.hosts}))

    @property
    def ready(self) -> bool:
        """Some engine may generate at the group's version."""
        return bool(self._current())

    @property
    def waits_for(self) -> str:
        """What has to happen until one of them is ready, for people; empty: one is."""
        if self.ready:
            return ""
        waiting = [engine.host.waits_for for engine in self.engines if not engine.out and not engine.host.ready]
        if waiting:
            return waiting[0]
        return "an engine to take the newest version" if self.engines else "the model, to assign devices by its size"

    @property
    def restarts(self) -> int:
        return sum(host.restarts for host in self.hosts)

    @property
    def reloads(self) -> int:
        return sum(host.reloads for host in self.hosts)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep all of them running until cancelled.

        Raises `UsageError` as `EngineHost.run` does, in a group of exceptions, when no engine is left. As long as
        another one is, an engine that cannot be started is given up.
        """
        async with trio.open_nursery() as nursery:
            for engine in self.engines:
                await nursery.start(self._run_one, engine)
            self._rounds = nursery
            task_status.started()

    async def _run_one(self, engine: GroupedEngine, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            await engine.host.run(task_status=task_status)
        except UsageError as error:
            engine.out = str(error)
            if self._rounds is None or all(other.out for other in self.engines):
                raise
            _log.warning("engine_given_up", number=engine.number, devices=",".join(engine.devices), why=str(error))
            self._note_change()

    async def wait_ready(self) -> None:
        """Wait until some engine may generate at the group's version."""
        while not self.ready:
            await self._wait_change()

    async def wait_up(self) -> None:
        """Wait until a version can be given to some engine."""
        while not self._up:
            await self._wait_change()

    @property
    def filled(self) -> bool:
        """Every engine that was not given up holds the weights of some version."""
        return all(engine.host.ready or engine.out for engine in self.engines)

    async def wait_filled(self) -> None:
        """Wait until they are `filled`."""
        while not self.filled:
            await self._wait_change()

    async def _wait_change(self) -> None:
        """Wait until an engine becomes ready, takes a version or is given up."""
        with trio.move_on_after(LOOK_EVERY_S):
            async with trio.open_nursery() as nursery:

                async def wait(event: Callable[[], Awaitable[object]]) -> None:
                    await event()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(wait, self._changed.wait)
                for engine in self.engines:
                    if not engine.host.ready:
                        nursery.start_soon(wait, engine.host.wait_ready)

    # ------------------------------------------------------------ sleep

    @property
    def asleep(self) -> bool:
        """All engines sleep."""
        return bool(self.engines) and all(host.asleep for host in self.hosts)

    async def sleep(self) -> None:
        """End the engines' processes; on return their memory is free. See `EngineHost.sleep`."""
        async with trio.open_nursery() as nursery:
            for host in self.hosts:
                nursery.start_soon(host.sleep)

    def wake(self) -> None:
        """Start the engines again. See `EngineHost.wake`."""
        for host in self.hosts:
            host.wake()

    # ------------------------------------------------------------ generating

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[Sequence[Completion], float]:
        """As `EngineHost.generate`, by the engine that generates the fewest sequences of those that are at the group's
        version and have the adapter's newest one. Raises `EngineFailed` where none has it."""
        chosen = min(self._able(adapter), key=lambda engine: engine.sequences)

        def count(numbers: tuple[int, ...]) -> None:
            chosen.heard_at = trio.current_time()
            if counts is not None:
                counts(numbers)

        with trio.CancelScope() as given_up, _busy(chosen, len(prompts), given_up):
            return await chosen.host.generate(prompts, sampling, count, adapter, draws)
        raise EngineLost("the engine does not answer; another one is to generate this")

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]:
        return await self._able(adapter)[0].host.score(prompt, token_ids, sampling, adapter)

    async def judge(self, claim: Claim) -> Judgement:
        """As `EngineHost.judge`. One engine judges all, so that claims which overlap share its rewinds."""
        return await self._able(claim.adapter)[0].host.judge(claim)

    def _able(self, adapter: str) -> list[GroupedEngine]:
        """`_current`, at least one."""
        able = self._current(adapter)
        if not able and self.ready:
            raise EngineFailed(f"no engine holds the newest version of the adapter {adapter}", poisoned=False)
        if not able:
            raise EngineLost("no engine is ready")
        return able

    # ------------------------------------------------------------ versions

    async def stage(self, patch_fd: int, version: Version) -> float:
        """Stage on all engines that lack the version. Returns the longest time, in seconds.

        An engine that cannot stage fails at its commit, and is reloaded.
        """
        answers = await self._on_each(self._behind(version), lambda host, fd: host.stage(fd, version), patch_fd)
        return max(answers, default=0.0)

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        """Commit on each engine that lacks the version. Returns the longest pauses of those that are not late."""
        self._want(version)
        answers = await self._on_each(self._behind(version), lambda host, _: host.commit(version, root))
        commits = [commit for commit in answers if commit is not None]
        if not commits:
            return None
        return Commitment(max(commit.pause_s for commit in commits), max(commit.resume_s for commit in commits))

    async def reload(self, lacking: Version | None = None) -> None:
        """Reload from the replica as it is now: every ready engine, or those that lack the version `lacking`; also one
        that becomes ready later, if it was loaded with an older version."""
        if lacking is not None:
            self._want(lacking)
        engines = [engine for engine in self._up if not engine.late] if lacking is None else self._behind(lacking)
        await self._on_each(engines, lambda host, _: host.reload())

    async def _on_each(
        self, engines: Sequence[GroupedEngine], call: Callable[[EngineHost, int], Awaitable[AnswerT]], fd: int = -1
    ) -> list[AnswerT]:
        """The answers of the engines that do not fail, without those that are left behind.

        `call` gets a copy of the descriptor `fd` (-1: there is none), because the caller closes its own while an engine
        that is late may still need it. Raises the first error when all of them fail.
        """
        assert self._rounds is not None, "the group does not run"
        answers: list[AnswerT] = []
        errors: list[EngineLost | EngineFailed] = []
        pending = {engine for engine in engines if not engine.late}
        left_behind: set[GroupedEngine] = set()
        news = trio.Event()

        async def one(engine: GroupedEngine, own: int) -> None:
            nonlocal news
            try:
                answers.append(await call(engine.host, own))
            except (EngineLost, EngineFailed) as error:
                errors.append(error)
            finally:
                if own != -1:
                    os.close(own)
                pending.discard(engine)
                news.set()
                news = trio.Event()
                self._note_change()
            if engine in left_behind:
                await self._catch_up(engine)

        began = trio.current_time()
        for engine in engines:
            self._rounds.start_soon(one, engine, fd if fd == -1 else os.dup(fd))
        patience = trio.CancelScope()
        with patience:
            while pending:
                if answers and math.isinf(patience.deadline):
                    took_s = trio.current_time() - began
                    patience.deadline = trio.current_time() + max(LATE_S, LATE_TIMES * took_s)
                await news.wait()
        left_behind |= pending
        for engine in pending:
            engine.late = True
            if engine.heard_at < began:  # it draws nothing either
                for scope in tuple(engine.running):
                    scope.cancel()
            _log.warning("engine_late", number=engine.number, seconds=round(trio.current_time() - began, 1))
        if errors and not answers:
            raise errors[0]
        return list(answers)

    def _want(self, version: Version) -> None:
        """The replica is at `version`. An engine that is not ready may be loading what it was before."""
        self._wanted = max(self._wanted, version)
        for engine in self.engines:
            if self._rounds is not None and not (engine.host.ready or engine.filling or engine.out):
                engine.filling = True
                self._rounds.start_soon(self._fill, engine)

    async def _fill(self, engine: GroupedEngine) -> None:
        await engine.host.wait_ready()
        engine.filling = False
        await self._catch_up(engine)

    async def _catch_up(self, engine: GroupedEngine) -> None:
        """An engine that was left behind has answered, or was lost, or was loaded meanwhile: fill it from the replica
        if it is too old."""
        try:
            while engine.host.lacks(self._wanted):
                await engine.host.reload()
        except EngineLost as error:
            _log.warning("engine_lost", why=str(error))  # it is started again, and filled then
        finally:
            engine.late = False
            self._note_change()

    async def prove(self) -> tuple[bytes, bool]:
        """(the root that all ready hosts hold, or empty when they differ; whether each holds the root of its version,
        and those of its adapters). One that was left behind serves nothing and is not asked.

        Raises `EngineLost` when none is ready.
        """
        roots: set[bytes] = set()
        proven = True
        for host in [engine.host for engine in self._up if not engine.late]:
            claimed = host.root
            roots.add(root := await host.prove())
            proven = proven and root in (claimed, host.root)  # a commit may have come first in the queue
            proven = proven and await host.prove_adapters()
        if not roots:
            raise EngineLost("no engine is ready")
        return roots.pop() if len(roots) == 1 else b"", proven

    # ------------------------------------------------------------ adapters

    @property
    def adapters(self) -> dict[str, Version]:
        """The adapters that some engine can draw with at the group's version, by name, each with its newest version."""
        names = {name for engine in self._current() for name in engine.host.adapters}
        able = {name: self._current(name) for name in names}
        return {name: engines[0].host.adapters[name] for name, engines in able.items() if engines}

    async def set_adapter(
        self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes
    ) -> float | None:
        """As `EngineHost.set_adapter`, on all hosts. Returns the longest pause; None when no host is ready.

        Raises `EngineFailed` when no host can serve the adapter.
        """
        answers = await self._on_each(
            self.engines, lambda host, own: host.set_adapter(slot, config, own, version, root), fd
        )
        taken = [seconds for seconds in answers if seconds is not None]
        if taken:
            self._adapters[config.name] = max(version, self._adapters.get(config.name, version))
        return max(taken, default=None)

    async def drop_adapter(self, slot: int) -> None:
        """As `EngineHost.drop_adapter`, on all hosts."""
        await self._on_each(self.engines, lambda host, _: host.drop_adapter(slot))

    async def prove_adapter(self, slot: int) -> bytes:
        """The slot's root that all ready hosts hold, or empty when they differ. Raises as `EngineHost.prove_adapter`,
        and `EngineLost` when none is ready."""
        roots = {await engine.host.prove_adapter(slot) for engine in self._up}
        if not roots:
            raise EngineLost("no engine is ready")
        return roots.pop() if len(roots) == 1 else b""


@contextmanager
def _busy(engine: GroupedEngine, count: int, scope: trio.CancelScope) -> Iterator[None]:
    """While the engine generates so many sequences. `scope`: to be cancelled when they are given up."""
    engine.sequences += count
    engine.running.add(scope)
    try:
        yield
    finally:
        engine.sequences -= count
        engine.running.discard(scope)
