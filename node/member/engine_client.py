"""What the rollout worker uses of an engine; see `node.engines.host.EngineHost` for each."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from codec.adapter import AdapterConfig
from node.engines.base import Completion, Prompt, SamplingParams, Version
from node.engines.host import Commitment, Counts
from node.engines.judgement import Claim, Judgement
from node.engines.link import Draws
from node.engines.room import Room

__all__ = ["EngineClient"]


class EngineClient(Protocol):
    """One engine (`node.engines.host.EngineHost`) or several that act as one (`node.engines.group.EngineGroup`)."""

    @property
    def version(self) -> Version: ...

    @property
    def root(self) -> bytes: ...

    @property
    def preemptible(self) -> bool: ...

    @property
    def continuous_batching(self) -> bool: ...

    @property
    def room(self) -> Room: ...

    @property
    def scores(self) -> bool: ...

    @property
    def abilities(self) -> frozenset[str]: ...

    @property
    def kind(self) -> str: ...

    @property
    def ready(self) -> bool: ...

    async def wait_ready(self) -> None: ...

    async def wait_up(self) -> None: ...

    def lacks(self, version: Version) -> bool: ...

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[Sequence[Completion], float]: ...

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]: ...

    @property
    def adapters(self) -> Mapping[str, Version]: ...

    async def set_adapter(
        self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes
    ) -> float | None: ...

    async def drop_adapter(self, slot: int) -> None: ...

    async def judge(self, claim: Claim) -> Judgement: ...

    async def stage(self, patch_fd: int, version: Version) -> float: ...

    async def commit(self, version: Version, root: bytes) -> Commitment | None: ...
