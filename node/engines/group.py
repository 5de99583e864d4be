"""Several engines of one node, used as one: each generates at its own rate and commits each version by itself."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import trio

from codec.adapter import AdapterConfig
from node.engines.base import REPLAYS, Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, Counts, EngineFailed, EngineHost, EngineLost
from node.engines.judgement import Claim, Judgement
from node.engines.link import Draws
from node.verification.classes import PREFIX, in_format

__all__ = ["EngineGroup"]

AnswerT = TypeVar("AnswerT")


class EngineGroup:
    """An engine client of one or more hosts. Its properties hold for every ready host."""

    def __init__(self, hosts: Sequence[EngineHost], form: str = "") -> None:
        """`form`: the format (`codec.formats`) whose codes the weights stand for; empty: they are the base's."""
        assert hosts
        self.hosts = tuple(hosts)
        self._form = form
        self._load = dict.fromkeys(range(len(self.hosts)), 0)
        """Sequences that each host generates at the moment, by its index."""

    @property
    def _ready(self) -> list[EngineHost]:
        return [host for host in self.hosts if host.ready]

    @property
    def _oldest(self) -> EngineHost:
        return min(self._ready or self.hosts, key=lambda host: host.version)

    @property
    def version(self) -> Version:
        """The oldest version that a ready host holds. Every ready host can do work for it."""
        return self._oldest.version

    @property
    def root(self) -> bytes:
        return self._oldest.root

    @property
    def preemptible(self) -> bool:
        return all(host.preemptible for host in self.hosts)

    @property
    def continuous_batching(self) -> bool:
        return all(host.continuous_batching for host in self.hosts)

    @property
    def scores(self) -> bool:
        return self._oldest.scores

    @property
    def abilities(self) -> frozenset[str]:
        """Those that every ready host has. Hosts of several arithmetic classes promise no bits together."""
        named = [host.abilities for host in self._ready or self.hosts]
        classes = {name for abilities in named for name in abilities if name.startswith(PREFIX)}
        found = in_format(frozenset.intersection(*named), self._form)
        return found if len(classes) < 2 else found - {REPLAYS}

    @property
    def kind(self) -> str:
        return "+".join(sorted({host.kind for host in self.hosts}))

    @property
    def ready(self) -> bool:
        return bool(self._ready)

    @property
    def waits_for(self) -> str:
        """What has to happen until one of them is ready, for people; empty: one is."""
        return "" if self.ready else self.hosts[0].waits_for

    @property
    def restarts(self) -> int:
        return sum(host.restarts for host in self.hosts)

    @property
    def reloads(self) -> int:
        return sum(host.reloads for host in self.hosts)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep all of them running until cancelled. Raises `UsageError` as `EngineHost.run` does."""
        async with trio.open_nursery() as nursery:
            for host in self.hosts:
                await nursery.start(host.run)
            task_status.started()

    async def wait_ready(self) -> None:
        """Wait until one of the hosts is ready."""
        if not self.ready:
            async with trio.open_nursery() as nursery:

                async def wait(host: EngineHost) -> None:
                    await host.wait_ready()
                    nursery.cancel_scope.cancel()

                for host in self.hosts:
                    nursery.start_soon(wait, host)

    # ------------------------------------------------------------ generating

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[Sequence[Completion], float]:
        """As `EngineHost.generate`, by the ready host that generates the fewest sequences and holds the adapter."""
        ready = [i for i, host in enumerate(self.hosts) if host.ready]
        if not ready:
            raise EngineLost("no engine is ready")
        able = [i for i in ready if not adapter or adapter in self.hosts[i].adapters]
        chosen = min(able or ready, key=lambda i: (self._load[i], i))
        with self._busy(chosen, len(prompts)):
            return await self.hosts[chosen].generate(prompts, sampling, counts, adapter, draws)

    @contextmanager
    def _busy(self, i: int, count: int) -> Iterator[None]:
        self._load[i] += count
        try:
            yield
        finally:
            self._load[i] -= count

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]:
        return await self._oldest.score(prompt, token_ids, sampling, adapter)

    async def judge(self, claim: Claim) -> Judgement:
        return await self._oldest.judge(claim)

    # ------------------------------------------------------------ versions

    async def stage(self, patch_fd: int, version: Version) -> float:
        """Stage on all ready hosts at once. Returns the longest time, in seconds.

        A host that cannot stage fails at its commit, and is reloaded.
        """
        behind = [host for host in self._ready if host.version < version]
        return max(await _together(behind, lambda host: host.stage(patch_fd, version)), default=0.0)

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        """Commit on each ready host by itself, so that no host waits for another. Returns the longest pauses."""
        behind = [host for host in self._ready if host.version < version]
        answers = await _together(behind, lambda host: host.commit(version, root))
        commits = [commit for commit in answers if commit is not None]
        if not commits:
            return None
        return Commitment(max(commit.pause_s for commit in commits), max(commit.resume_s for commit in commits))

    async def reload(self) -> None:
        """Reload every ready host from the replica as it is now."""
        await _together(self._ready, lambda host: host.reload())

    async def prove(self) -> tuple[bytes, bool]:
        """(the root that all ready hosts hold, or empty when they differ; whether each holds the root of its version,
        and those of its adapters).

        Raises `EngineLost` when none is ready.
        """
        roots: set[bytes] = set()
        proven = True
        for host in self._ready:
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
        """The adapters that some ready host serves, by name, each with the oldest version that one holds."""
        found: dict[str, Version] = {}
        for host in self._ready:
            for name, version in host.adapters.items():
                found[name] = min(found.get(name, version), version)
        return found

    async def set_adapter(
        self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes
    ) -> float | None:
        """As `EngineHost.set_adapter`, on all hosts. Returns the longest pause; None when no host is ready.

        Raises `EngineFailed` when no host can serve the adapter.
        """
        answers = await _together(self.hosts, lambda host: host.set_adapter(slot, config, fd, version, root))
        return max((seconds for seconds in answers if seconds is not None), default=None)

    async def drop_adapter(self, slot: int) -> None:
        """As `EngineHost.drop_adapter`, on all hosts."""
        await _together(self.hosts, lambda host: host.drop_adapter(slot))

    async def prove_adapter(self, slot: int) -> bytes:
        """The slot's root that all ready hosts hold, or empty when they differ. Raises as `EngineHost.prove_adapter`,
        and `EngineLost` when none is ready."""
        roots = {await host.prove_adapter(slot) for host in self._ready}
        if not roots:
            raise EngineLost("no engine is ready")
        return roots.pop() if len(roots) == 1 else b""


async def _together(hosts: Sequence[EngineHost], call: Callable[[EngineHost], Awaitable[AnswerT]]) -> list[AnswerT]:
    """The answers of the hosts that do not fail. Raises the first error when all of them fail."""
    answers: list[AnswerT] = []
    errors: list[EngineLost | EngineFailed] = []

    async def one(host: EngineHost) -> None:
        try:
            answers.append(await call(host))
        except (EngineLost, EngineFailed) as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for host in hosts:
            nursery.start_soon(one, host)
    if errors and not answers:
        raise errors[0]
    return answers
