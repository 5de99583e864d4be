"""A node's engine and its work, tied to the node's replica.

replica committed --> patch (memfd) --> worker: staged while the engine generates, committed between two batches
replica changed otherwise (catch-up, repair) --> the engine is reloaded from it
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import structlog
import trio

from codec import Staged, write_patch
from codec.sign import Key
from node.engines.group import EngineGroup
from node.engines.host import EngineDeadlines, EngineHost, EngineLost, EngineSpec, ReplicaRef, worker_command
from node.engines.vllm.specs import specs_of
from node.member.worker import NodeWorker
from node.settings.config import JoinConfig
from swarm.protocol.core.events import VersionId
from swarm.runtime import in_thread
from swarm.runtime.replica.model import Model
from swarm.store import Store

__all__ = ["EngineRuntime"]

_log = structlog.get_logger(__name__)
_SOCKET: Final = "engine.sock"
_LOG: Final = "engine.log"
_FILES: Final = "model-files"

Changes = Sequence[Staged] | None


class EngineRuntime:
    """One engine, one worker. `send(body)` hands a `Work` body to the authority and may lose it."""

    def __init__(self, config: JoinConfig, key: Key, store: Store, model: Model, send: Callable[[bytes], None]) -> None:
        self._config, self._store, self._model = config, store, model
        self._send_body = send
        self._held = trio.Event()
        """The replica is a version, so there is something to fill an engine from."""
        self._commits: deque[tuple[VersionId, bytes, Changes]] = deque()
        self._news = trio.Event()
        self.urls: tuple[str, ...] = ()
        """Of the engines' OpenAI endpoints."""
        self.host = EngineGroup(self._vllms() if config.engine == "vllm" else [self._own()])
        self.worker = NodeWorker(key, self.host, self._send)
        self.live_root: bytes | None = None
        self.live_proven: bool | None = None

    def _own(self) -> EngineHost:
        """An engine in a process of this very environment."""
        config, socket = self._config, self._config.home / _SOCKET
        device = None if config.device == "auto" else config.device
        command = worker_command(socket, config.engine, config.threads, device)
        return EngineHost(EngineSpec(socket, command, config.home / _LOG), self._source)

    def _vllms(self) -> list[EngineHost]:
        """A driver process for each vLLM, which starts it or attaches to it."""
        specs = specs_of(self._config)
        self.urls = tuple(spec.url for spec in specs)
        return [EngineHost(spec, self._source, EngineDeadlines(commit_s=300.0)) for spec in specs]

    async def run(self) -> None:
        """Until cancelled. Raises `UsageError` when the engine cannot be started or refuses the model."""
        if self._model.version is not None:
            self._held.set()
        async with trio.open_nursery() as nursery:
            await nursery.start(self.host.run)
            nursery.start_soon(self._follow)
            await nursery.start(self.worker.run)
            await trio.sleep_forever()

    # ------------------------------------------------------------ from the swarm

    def committed(self, version: VersionId, root: bytes, changes: Changes) -> None:
        """The replica is `version`; `changes`: what was written since the one before, None when that is not known."""
        self._commits.append((version, root, changes))
        self._held.set()
        self._news.set()

    async def _follow(self) -> None:
        """Hand each commit on, in order: as a patch, or as word to start over from the replica."""
        while True:
            await self._news.wait()
            self._news = trio.Event()
            while self._commits:
                version, root, changes = self._commits.popleft()
                if changes is None:
                    await self._start_over(version)
                else:
                    assert self._model.layout is not None
                    descriptor, _ = await in_thread(write_patch, changes, self._model.layout)
                    self.worker.update(version, root, descriptor)

    async def _start_over(self, version: VersionId) -> None:
        if not self.host.ready or self.host.version >= version:
            return  # it will be filled with what the replica is then
        try:
            await self.host.reload()
        except EngineLost as error:
            _log.warning("engine_lost", why=str(error))

    async def _source(self) -> ReplicaRef:
        """What to fill an engine from, as it is now."""
        await self._held.wait()
        folder = await in_thread(self._write_files)
        while (loan := await in_thread(self._model.lend)) is None:  # noqa: ASYNC110 - catching up, which tells nobody
            await trio.sleep(0.1)
        return ReplicaRef(loan.layout, loan.fd, folder, loan.version, loan.root)

    def _write_files(self) -> Path:
        """Config, tokenizer and the like, as the layout names them, where an engine can load them."""
        folder = self._config.home / _FILES
        folder.mkdir(parents=True, exist_ok=True)
        assert self._model.layout is not None
        for spec in self._model.layout.files:
            data = self._store.file(spec.hash)
            if data is not None:
                (folder / spec.name).write_bytes(data)
        return folder

    async def _send(self, body: bytes) -> None:
        self._send_body(body)
        await trio.lowlevel.checkpoint()

    # ------------------------------------------------------------ for reports and people

    @property
    def engine_name(self) -> str:
        """What generates, while it can; empty until then."""
        return self._config.engine if self.host.ready else ""

    @property
    def engine_version(self) -> VersionId:
        return VersionId(*self.host.version)

    async def prove(self) -> None:
        """Read the bits back out of the engine; `state` then says what root they add up to, and if it is right."""
        self.live_root = self.live_proven = None
        try:
            self.live_root, self.live_proven = await self.host.prove()
        except EngineLost as error:
            _log.warning("engine_lost", why=str(error))

    def state(self) -> dict[str, Any]:
        """Plain values for `status`."""
        return {
            "engine": list(self.host.version) if self.host.ready else None,
            "live_root": None if self.live_root is None else self.live_root.hex(),
            "live_proven": self.live_proven,
            "engine_restarts": self.host.restarts,
            "engine_reloads": self.host.reloads,
            "engine_urls": list(self.urls),
            "tokens_s": self.worker.tokens_per_s,
            "commits": [{"version": [c.epoch, c.version], "pause_ms": 1e3 * c.pause_s} for c in self.worker.commits],
            "work": self.worker.state(),
        }
