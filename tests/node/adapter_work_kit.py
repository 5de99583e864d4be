"""Nodes whose engines serve adapters, and a seed that publishes them; under the virtual clock, as `work_kit`."""

import os
from types import SimpleNamespace
from typing import Any

from work_kit import SAMPLING, TOKENS, Swarm, TimedEngine, head, root

from node.engines.base import ABILITIES, JUDGES, JUDGES_ADAPTERS, REPLAYS, Span
from node.engines.host import EngineFailed
from node.ledger.binding import Binding
from node.ledger.messages import decode
from node.ledger.part_history import Change
from node.ledger.settings import Settings
from node.member.engine_updater import AdapterUpdate

CAN = ABILITIES - {JUDGES, JUDGES_ADAPTERS, REPLAYS}


class AdapterEngine(TimedEngine):
    """As `TimedEngine`, with adapters, which it names as a real one does: by the version that last changed them."""

    def __init__(self, rate: float = 1000.0, version: int = 0) -> None:
        super().__init__(rate, version)
        self.abilities = CAN
        self.preemptible = True
        self.adapters: dict[str, tuple[int, int]] = {}
        self.slots: dict[int, str] = {}
        self.drawn: list[tuple[str, Any]] = []
        self.pause_s = 0.004
        self.refuses = ""

    async def generate(self, prompts, sampling, counts=None, adapter="", draws=None):
        assert not sampling.extra.adapter, "the engine gets it by its own argument"
        if adapter and adapter not in self.adapters:
            raise EngineFailed(f"the adapter {adapter} was removed", poisoned=False)
        self.drawn.append((adapter, sampling))
        before = self.version_of(adapter)
        found, seconds = await super().generate(prompts, sampling, counts)
        if adapter and adapter not in self.adapters:
            raise EngineFailed(f"the adapter {adapter} was removed", poisoned=False)
        after = self.version_of(adapter)
        spans = (Span(before, 0, TOKENS),)
        if after != before:
            spans = (Span(before, 0, 10), Span(after, 10, TOKENS))
        return [type(one)(one.token_ids, one.logprobs, one.finish_reason, spans) for one in found], seconds

    def version_of(self, adapter: str) -> tuple[int, int]:
        return max(self.version, self.adapters[adapter]) if adapter else self.version

    async def set_adapter(self, slot, config, fd, version, root):
        if config.name == self.refuses:
            raise EngineFailed("rank 64 is more than --max-lora-rank 16", poisoned=False)
        self.slots[slot], self.adapters[config.name] = config.name, version
        return self.pause_s

    async def drop_adapter(self, slot):
        self.adapters.pop(self.slots.pop(slot, ""), None)


class AdapterSwarm(Swarm):
    """Seals versions that change the base or one adapter, and tells the nodes."""

    def __init__(self, folder, nursery) -> None:
        super().__init__(folder, nursery)
        self.settings = Settings(min_deadline_s=20.0, max_deadline_s=300.0, check_share=0.0)
        self.version = 0
        self.owns: dict[str, int] = {}

    def step(self, name: str = "", *, removed: bool = False, told: bool = True) -> None:
        self.version += 1
        if name:
            self.owns[name] = self.owns.get(name, 0) + 1
        if removed:
            del self.owns[name]
        change = Change(not name, frozenset({name} if name else ()), dict(self.owns))
        self.head = head(self.version)
        self.service.sealed(self.head, change)
        slot = 0 if not name else ord(name) - ord("a")
        for worker in self.wire.workers.values() if told else ():
            if not name:
                worker.update((0, self.version), root(self.version), os.memfd_create("patch"), change, b"\7" * 32)
                continue
            config: Any = None if removed else SimpleNamespace(name=name)
            fd = None if removed else os.memfd_create("weights")
            update = AdapterUpdate(slot, config, fd, bytes(32))
            worker.update((0, self.version), root(self.version), None, change, adapters=[update])

    def said(self, kind: type) -> list:
        return [message for _, body in self.wire.bodies if isinstance(message := decode(body), kind)]


def adapted(name: str, **more: Any) -> Binding:
    return Binding(2, SAMPLING.with_options(adapter=name), **more)
