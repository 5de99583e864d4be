"""Several engines of one node, as one: each generates at its own rate and takes each version by its own commit."""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any

import trio

from node.engines.base import Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, Counts, EngineFailed, EngineHost, EngineLost

__all__ = ["EngineGroup"]


class EngineGroup:
    """An engine seat of one or more hosts. What it says of itself is true of every ready one."""

    def __init__(self, hosts: Sequence[EngineHost]) -> None:
        assert hosts
        self.hosts = tuple(hosts)
        self._load = dict.fromkeys(range(len(self.hosts)), 0)
        """Sequences that each of them generates."""

    @property
    def _ready(self) -> list[EngineHost]:
        return [host for host in self.hosts if host.ready]

    @property
    def _oldest(self) -> EngineHost:
        return min(self._ready or self.hosts, key=lambda host: host.version)

    @property
    def version(self) -> Version:
        """The oldest that a ready one holds: work for it can be done by any."""
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
        return frozenset.intersection(*(host.abilities for host in self.hosts))

    @property
    def kind(self) -> str:
        return "+".join(sorted({host.kind for host in self.hosts}))

    @property
    def ready(self) -> bool:
        return bool(self._ready)

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
        """Wait until one of them is."""
        if not self.ready:
            async with trio.open_nursery() as nursery:

                async def wait(host: EngineHost) -> None:
                    await host.wait_ready()
                    nursery.cancel_scope.cancel()

                for host in self.hosts:
                    nursery.start_soon(wait, host)

    # ------------------------------------------------------------ generating

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, counts: Counts | None = None
    ) -> tuple[Sequence[Completion], float]:
        """As `EngineHost.generate`, by the ready one that has least to do."""
        ready = [i for i, host in enumerate(self.hosts) if host.ready]
        if not ready:
            raise EngineLost("no engine is ready")
        chosen = min(ready, key=lambda i: (self._load[i], i))
        with self._busy(chosen, len(prompts)):
            return await self.hosts[chosen].generate(prompts, sampling, counts)

    @contextmanager
    def _busy(self, i: int, count: int):
        self._load[i] += count
        try:
            yield
        finally:
            self._load[i] -= count

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[tuple[float, ...], Version]:
        return await self._oldest.score(prompt, token_ids, sampling)

    # ------------------------------------------------------------ versions

    async def stage(self, patch_fd: int, version: Version) -> float:
        """All of them at once; the longest. One that cannot fails at its commit, and is reloaded."""
        behind = [host for host in self._ready if host.version < version]
        return max(await _together(behind, lambda host: host.stage(patch_fd, version)), default=0.0)

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        """Each by itself: one that has to wait holds up no other. The longest pause."""
        behind = [host for host in self._ready if host.version < version]
        took = [each for each in await _together(behind, lambda host: host.commit(version, root)) if each is not None]
        if not took:
            return None
        return Commitment(max(each.pause_s for each in took), max(each.resume_s for each in took))

    async def reload(self) -> None:
        """All that are ready, from the replica as it is."""
        await _together(self._ready, lambda host: host.reload())

    async def prove(self) -> tuple[bytes, bool]:
        """(The root that all of them hold, empty when they hold different ones; is each one's that of the version that
        it says it holds?). Raises `EngineLost`."""
        roots: set[bytes] = set()
        proven = True
        for host in self._ready:
            said = host.root
            roots.add(root := await host.prove())
            proven = proven and root in (said, host.root)  # a commit may have been before it in the queue
        if not roots:
            raise EngineLost("no engine is ready")
        return roots.pop() if len(roots) == 1 else b"", proven


async def _together(hosts: Sequence[EngineHost], call: Callable[[EngineHost], Any]) -> list[Any]:
    """What each of them answers; raises the first error when all fail, else leaves out those that do."""
    answers: list[Any] = []
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
