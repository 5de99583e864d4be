"""The adapters that a node wants its engine to serve, and those whose live bits the engine has proven.

The node gives each version once. What it gave is kept, as descriptors of sealed memory, and given again to an engine
that was started or loaded anew. An engine serves nothing of an adapter before its bits are proven.
"""

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from codec.adapter import AdapterConfig
from codec.errors import UsageError
from node.engines.base import Completion, Version
from node.engines.link import EngineFailed, EngineLink, EngineLost
from node.engines.messages import AdapterProof, Done, DropAdapter, ProveAdapter, SetAdapter
from node.settings.event_log import EventLog

__all__ = ["HeldAdapters"]

VERSIONS: Final = 64
"""Versions of an adapter that the engine held lately and that are remembered: a sequence may have begun at any."""

_log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Adapter:
    """One version. `fd`: our own descriptor of its weights."""

    slot: int
    name: str
    config: bytes
    fd: int
    version: Version
    root: bytes


class HeldAdapters:
    """Calls may come from any task; the engine gets one version at a time."""

    def __init__(self, set_within_s: float, prove_within_s: float) -> None:
        """Seconds after which an engine that does not answer is killed."""
        self._set_within_s, self._prove_within_s = set_within_s, prove_within_s
        self._wanted: dict[int, _Adapter] = {}
        self._proven: dict[int, _Adapter] = {}
        self._held: dict[str, deque[Version]] = {}
        """By name: versions that were served lately."""
        self._coming: dict[str, tuple[Version, trio.Event]] = {}
        """By name: the version that the engine is to switch to, and the end of that call."""
        self._link: EngineLink | None = None
        self._giving = trio.Lock()

    @property
    def served(self) -> dict[str, Version]:
        """The adapters that the engine serves, by name, with the version that it holds of each."""
        return {adapter.name: adapter.version for adapter in self._proven.values()}

    async def give_all(self, link: EngineLink) -> None:
        """Give an engine that holds the base everything. What it refuses is logged, and not served.

        Raises `EngineLost` when the engine is gone.
        """
        async with self._giving:
            self._link = link
            for adapter in list(self._wanted.values()):
                try:
                    await self._give(link, adapter)
                except EngineFailed as error:
                    _log.warning("adapter_refused", adapter=adapter.name, why=str(error))

    def lose(self) -> None:
        """The engine serves nothing any more. Adapters that are set now are given to the next one."""
        self._link = None
        self._proven.clear()

    async def set(self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes) -> float | None:
        """See `EngineHost.set_adapter`."""
        encoded = config.to_bytes()
        async with self._giving:
            self._forget(slot)
            if slot in self._proven and self._proven[slot].name != config.name:
                await self._drop(slot)
            adapter = self._wanted[slot] = _Adapter(slot, config.name, encoded, os.dup(fd), version, root)
            return None if self._link is None else await self._give(self._link, adapter)

    async def _give(self, link: EngineLink, adapter: _Adapter) -> float:
        message = SetAdapter(link.next_number(), adapter.slot, adapter.config, adapter.version, adapter.root)
        ended = trio.Event()
        self._coming[adapter.name] = adapter.version, ended
        try:
            proof = await link.ask(message, AdapterProof, self._set_within_s, [adapter.fd])
            if proof.root != adapter.root:
                raise EngineFailed(f"the engine's bits of the adapter {adapter.name} are not what was given", False)
            self._proven[adapter.slot] = adapter
            self._held.setdefault(adapter.name, deque(maxlen=VERSIONS)).append(adapter.version)
            for name in self._held.keys() - {wanted.name for wanted in self._wanted.values()}:
                del self._held[name]
            return proof.pause_s
        except UsageError as error:
            raise EngineFailed(str(error), poisoned=False) from error
        finally:
            ended.set()
            del self._coming[adapter.name]

    async def drop(self, slot: int) -> None:
        """See `EngineHost.drop_adapter`."""
        async with self._giving:
            self._forget(slot)
            await self._drop(slot)

    async def _drop(self, slot: int) -> None:
        if (dropped := self._proven.pop(slot, None)) is not None:
            self._held.pop(dropped.name, None)
        if self._link is not None:
            await self._link.ask(DropAdapter(self._link.next_number(), slot), Done, self._set_within_s)

    def _forget(self, slot: int) -> None:
        if (old := self._wanted.pop(slot, None)) is not None:
            os.close(old.fd)

    async def prove(self, slot: int) -> bytes:
        """See `EngineHost.prove_adapter`."""
        if self._link is None:
            raise EngineLost("the engine is not ready")
        message = ProveAdapter(self._link.next_number(), slot)
        return (await self._link.ask(message, AdapterProof, self._prove_within_s)).root

    async def prove_all(self) -> bool:
        """See `EngineHost.prove_adapters`. A version that comes meanwhile may be proven in place of the one before."""
        for slot, adapter in list(self._proven.items()):
            try:
                root = await self.prove(slot)
            except EngineFailed:
                root = b""
            now = self._proven.get(slot)
            if now is not None and root not in (adapter.root, now.root):
                return False
        return True

    def close(self) -> None:
        """Close the descriptors."""
        for slot in list(self._wanted):
            self._forget(slot)

    # ------------------------------------------------------------ what tokens may name

    def check_served(self, name: str) -> None:
        """Raises `EngineFailed` for an adapter that the engine does not serve. Empty: the base, which it does."""
        if name and name not in self.served:
            raise EngineFailed(f"the engine does not hold the adapter {name}", poisoned=False)

    async def wait_proven(self, name: str, completions: Sequence[Completion]) -> None:
        """Wait for the proof of a version that the completions name: an engine draws tokens of it before it answers.

        Raises `EngineLost` when it was not proven.
        """
        coming = self._coming.get(name)
        if coming is None or not any(span.version == coming[0] for one in completions for span in one.spans):
            return
        version, ended = coming
        await ended.wait()
        if not self.held(name, version):
            raise EngineLost(f"tokens were drawn from a version of the adapter {name} that was not proven")

    def held(self, name: str, version: Version) -> bool:
        """Whether the engine held this version of the adapter lately."""
        return version in self._held.get(name, ())
