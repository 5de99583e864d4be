"""Brings each version into a node's engine: staged while the engine generates, then committed.

A preemptible engine keeps its sequences over a commit, so it commits at once and no token is lost. Another engine
commits when its running sequences are done; none is begun meanwhile (`taking`).
"""

import os
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio

from node.engines.base import Version
from node.engines.host import EngineFailed, EngineLost
from node.ledger.messages import Commits
from node.member.engine_client import EngineClient
from node.settings.event_log import EventLog

__all__ = ["EngineUpdater"]

_log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Update:
    """The replica became `version` at `at`, s; the engine has to follow. `patch_fd`: closed by the updater."""

    version: Version
    root: bytes
    patch_fd: int
    at: float


class EngineUpdater:
    """Calls `idle()` to wait until nothing is generated, `coming(version, root)` just before a commit,
    `paused(seconds)` just after it, and `changed()` when sequences may be begun again."""

    def __init__(
        self,
        engine: EngineClient,
        clock: Callable[[], float],
        *,
        idle: Callable[[], Awaitable[None]],
        coming: Callable[[Version, bytes], None],
        paused: Callable[[float], None],
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._clock = engine, clock
        self._idle, self._coming, self._paused, self._changed = idle, coming, paused, changed
        self._updates: deque[_Update] = deque()
        self._news = trio.Event()
        self.taking = False
        """A version is staged, or about to be committed."""
        self.commits: deque[Commits] = deque(maxlen=256)
        """The last commits, and what each took."""

    @property
    def pending(self) -> bool:
        return bool(self._updates) or self.taking

    def update(self, version: Version, root: bytes, patch_fd: int) -> None:
        """The replica became `version`. Closes `patch_fd` (see `codec.write_patch`) when done."""
        self._updates.append(_Update(version, root, patch_fd, self._clock()))
        self._news.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                if not self._updates:
                    self._news = trio.Event()
                    await self._news.wait()
                await self._engine.wait_ready()
                await self._follow(self._updates.popleft())
        finally:
            while self._updates:
                os.close(self._updates.popleft().patch_fd)

    async def _follow(self, update: _Update) -> None:
        if (
            update.version <= self._engine.version
        ):  # the engine was reloaded meanwhile, with this version or a newer one
            os.close(update.patch_fd)
            return
        try:
            stage_s = await self._stage(update)
            self.taking = True
            if not self._engine.preemptible:
                await self._idle()
            await self._commit(update, stage_s)
        finally:
            self.taking = False
            self._changed()

    async def _stage(self, update: _Update) -> float:
        try:
            return await self._engine.stage(update.patch_fd, update.version)
        except (EngineLost, EngineFailed) as error:
            # The commit fails too, and the engine is reloaded from the replica.
            _log.warning("not_staged", version="{}.{}".format(*update.version), why=str(error))
            return 0.0
        finally:
            os.close(update.patch_fd)

    async def _commit(self, update: _Update, stage_s: float) -> None:
        if update.version <= self._engine.version:
            return
        self._coming(update.version, update.root)
        try:
            took = await self._engine.commit(update.version, update.root)
        except (EngineLost, EngineFailed) as error:
            _log.warning("commit_failed", version="{}.{}".format(*update.version), why=str(error))
            return
        if took is not None:
            self._paused(took.pause_s)
            wait_s = self._clock() - update.at
            self.commits.append(Commits(*update.version, wait_s, stage_s, took.pause_s, took.resume_s))
