"""The swarm's draft model at one node: whether its engines load it, its folder, and what `status` says of it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import structlog
import trio
from msgspec import UNSET, UnsetType

from codec import Layout, state_root
from codec.adapter import AdapterSlots
from codec.parts import DRAFT, Part, PartBlocks, draft_blocks, draft_layout, part_layout
from node.engines.vllm.speculation import Drafts, drafts_of
from node.settings.config import JoinConfig
from node.status.schema import DraftStatus
from swarm.runtime import in_thread
from swarm.runtime.replica.model import Model
from swarm.store import Store

__all__ = ["NodeDraft"]

_log = structlog.get_logger(__name__)
_FILES: Final = "draft-files"
_LOOK_S: Final = 10.0
"""Between two questions for the engines' counts."""


class NodeDraft:
    """The draft model of one node with engines, where the swarm carries one."""

    def __init__(self, config: JoinConfig, store: Store, model: Model, urls: Sequence[str] = ()) -> None:
        """`urls`: of the engines that are vLLMs, where they are known."""
        self._config, self._store, self._model, self.urls = config, store, model, urls
        self._part: tuple[Layout, PartBlocks | None] | None = None
        """The layout, and where the draft is in it."""
        self._told = False
        self._versions = 0
        self._drafts = Drafts()

    def loaded(self, layout: Layout) -> bool:
        """Whether the engines propose tokens by the draft model of `layout`. The first time that they do not, although
        there is one, the log says why."""
        if self._part_of(layout) is None:
            return False
        why = self._why_not(layout)
        if why and not self._told:
            _log.info("draft_not_loaded", why=why)
        self._told = True
        return not why

    def _part_of(self, layout: Layout) -> PartBlocks | None:
        if self._part is None or self._part[0] is not layout:
            self._part = layout, part_layout(layout, DRAFT) if draft_blocks(layout) else None
        return self._part[1]

    def _why_not(self, layout: Layout) -> str:
        config = self._config
        if config.engine != "vllm":
            return f"the engine {config.engine} does not propose tokens by one"
        if config.format:
            return "a node that holds a format does not hold it"
        if config.engine_url:
            return "a vLLM that you run yourself cannot load it from the swarm"
        if not config.draft_tokens:
            return "--draft-tokens is 0"
        if config.replica == "engine":
            return "with --replica engine only the policy is read back"
        if AdapterSlots.of(layout) is not None:
            return "the engines serve adapters, beside which it has not been proven"
        return ""

    def folder(self, layout: Layout) -> Path | None:
        """A folder with the draft model's config and the like, for an engine that loads it; else None."""
        if not self.loaded(layout):
            return None
        own = draft_layout(layout)
        assert own is not None
        folder = self._config.home / _FILES
        folder.mkdir(parents=True, exist_ok=True)
        for spec in own.files:
            data = self._store.file(spec.hash)
            if data is not None:
                (folder / spec.name).write_bytes(data)
        return folder

    def note(self, parts: Iterable[Part]) -> None:
        """The replica became a version that changed these parts."""
        self._versions += DRAFT in parts

    async def run(self) -> None:
        """Follow the engines' counts, until cancelled."""
        while True:
            layout = self._model.layout
            if layout is not None and self.urls and self.loaded(layout):
                counts = [await in_thread(drafts_of, url) for url in self.urls]
                self._drafts = Drafts(sum(one.steps for one in counts), sum(one.accepted for one in counts))
            await trio.sleep(_LOOK_S)

    def status(self) -> DraftStatus | UnsetType:
        """For people and programs; `UNSET` for a swarm without a draft, and before there is a replica."""
        replica = self._model.replica
        if replica is None or (part := self._part_of(replica.layout)) is None or self._config.format:
            return UNSET
        loaded = not self._why_not(replica.layout)
        return DraftStatus(
            root=state_root(part.layout.hash, replica.hashes[part.blocks.start : part.blocks.stop]).hex(),
            versions=self._versions,
            weights_bytes=part.layout.nbytes,
            loaded=loaded,
            acceptance=self._drafts.acceptance if loaded else UNSET,
        )
