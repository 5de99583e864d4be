"""Brings each version into a node's engine: staged while the engine generates, then committed.

A preemptible engine keeps its sequences over a commit, so it commits at once and no token is lost. Another engine
commits when its running sequences are done; none is begun meanwhile (`taking`).
"""

import os
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import trio

from codec.adapter import AdapterConfig
from node.engines.base import Version
from node.engines.host import EngineFailed, EngineLost
from node.ledger.messages import Commits
from node.ledger.part_history import WHOLE, Change
from node.member.engine_client import EngineClient
from node.member.held_version import HeldVersion
from node.settings.event_log import EventLog

__all__ = ["AdapterUpdate", "EngineUpdater"]

_log = EventLog(__name__)


class AdapterUpdate(NamedTuple):
    """A version's change of one adapter slot. `config`: None: the slot is empty now. `fd`: its weights tensor in sealed
    memory; None with no `config`. `root`: `codec.parts.part_root` of the slot."""

    slot: int
    config: AdapterConfig | None = None
    fd: int | None = None
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class _Update:
    """The replica became `version` at `at`, s; the engine has to follow. See `EngineUpdater.update`."""

    version: Version
    root: bytes
    patch_fd: int | None
    change: Change
    base_root: bytes
    adapters: Sequence[AdapterUpdate]
    at: float

    def close(self) -> None:
        """Close the descriptors."""
        for fd in (self.patch_fd, *(adapter.fd for adapter in self.adapters)):
            if fd is not None:
                os.close(fd)


class EngineUpdater:
    """Calls `idle()` to wait until nothing is generated, `coming(version)` just before the engine gets a version,
    `paused(seconds)` just after it, and `changed()` when sequences may be begun again. `held` is told of each."""

    def __init__(
        self,
        engine: EngineClient,
        held: HeldVersion,
        clock: Callable[[], float],
        *,
        idle: Callable[[], Awaitable[None]],
        coming: Callable[[Version], None],
        paused: Callable[[float], None],
        changed: Callable[[], None],
    ) -> None:
        self._engine, self._held, self._clock = engine, held, clock
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

    def update(
        self,
        version: Version,
        root: bytes,
        patch_fd: int | None,
        change: Change = WHOLE,
        base_root: bytes = b"",
        adapters: Sequence[AdapterUpdate] = (),
    ) -> None:
        """The replica became `version`, whose root over all parts is `root`, and which made `change`.

        `patch_fd`: what is new of the base (see `codec.write_patch`); None: nothing. `base_root`: of the base alone;
        empty: `root`. `adapters`: the slots that changed. Closes all descriptors when done.
        """
        base_root = base_root or root
        self._updates.append(_Update(version, root, patch_fd, change, base_root, adapters, self._clock()))
        self._news.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                if not self._updates:
                    self._news = trio.Event()
                    await self._news.wait()
                await self._engine.wait_up()
                await self._follow(self._updates.popleft())
        finally:
            while self._updates:
                self._updates.popleft().close()

    async def _follow(self, update: _Update) -> None:
        try:
            stage_s = 0.0
            is_new = self._engine.lacks(update.version)  # or it was reloaded with this version, or a newer one
            if is_new and update.patch_fd is not None:
                stage_s = await self._stage(update, update.patch_fd)
                self.taking = True
                if not self._engine.preemptible:
                    await self._idle()
            self._held.coming(update.version, update.root, update.change)
            self._coming(update.version)
            if is_new and update.patch_fd is not None and not await self._commit(update, stage_s):
                return
            if await self._set_adapters(update):
                self._held.followed(update.version)
        finally:
            update.close()
            self.taking = False
            self._changed()

    async def _stage(self, update: _Update, patch_fd: int) -> float:
        try:
            return await self._engine.stage(patch_fd, update.version)
        except (EngineLost, EngineFailed) as error:
            # The commit fails too, and the engine is reloaded from the replica.
            _log.warning("not_staged", version=_name(update), why=str(error))
            return 0.0

    async def _commit(self, update: _Update, stage_s: float) -> bool:
        """Whether the engine, or the next one in its place, has the base of the version now."""
        if not self._engine.lacks(update.version):
            return True
        try:
            took = await self._engine.commit(update.version, update.base_root)
        except (EngineLost, EngineFailed) as error:
            _log.warning("commit_failed", version=_name(update), why=str(error))
            return False
        if took is not None:
            self._note(update, stage_s, took.pause_s, took.resume_s)
        return True

    async def _set_adapters(self, update: _Update) -> bool:
        """Give the engine the adapters that changed. One that it refuses is not served, and that is said in the log.
        Whether the engine, or the next one in its place, has them now."""
        for slot, config, fd, root in update.adapters:
            try:
                if config is None or fd is None:
                    await self._engine.drop_adapter(slot)
                    continue
                pause_s = await self._engine.set_adapter(slot, config, fd, update.version, root)
            except EngineFailed as error:
                _log.warning("adapter_refused", adapter="" if config is None else config.name, why=str(error))
            except EngineLost as error:
                _log.warning("commit_failed", version=_name(update), why=str(error))
                return False
            else:
                self._note(update, 0.0, pause_s or 0.0, 0.0)
        return True

    def _note(self, update: _Update, stage_s: float, pause_s: float, resume_s: float) -> None:
        self._paused(pause_s)
        wait_s = self._clock() - update.at
        self.commits.append(Commits(*update.version, wait_s, stage_s, pause_s, resume_s))


def _name(update: _Update) -> str:
    return "{}.{}".format(*update.version)
