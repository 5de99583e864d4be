"""A model of an engine: it takes the time of a real one and generates meaningless tokens.

Every running sequence gains tokens at the same speed, however many run, because generation is limited by reading the
weights. A commit pauses all sequences; they then continue under the new version, and their spans say so, as vLLM's do.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from codec.adapter import AdapterConfig
from node.engines.base import BASE_VERSION, Completion, Prompt, SamplingParams, Span, Version
from node.engines.host import Commitment, Counts, EngineFailed
from node.engines.judgement import Claim, Judgement
from node.engines.link import Draws
from node.engines.room import NO_ROOM_TOLD, Room

__all__ = ["ModelledEngine", "empty_patch"]

STOP: Final = 2
"""The token that ends a completion."""
REPORT_EVERY_S: Final = 2.5
"""How often the engine reports its token counts: a little more often than a worker renews its leases."""
LOGPROB: Final = -0.5


def empty_patch() -> int:
    """Return an open file descriptor of an empty patch. The caller closes it."""
    return os.open(os.devnull, os.O_RDONLY)


@dataclass(eq=False)
class ModelledEngine:
    """A model of an engine. `tokens_s` is the speed of one sequence in tokens per second. A completion has `mean`
    tokens on average; its length differs by at most `spread` of that."""

    tokens_s: float
    mean: int
    spread: float
    stage_s: float
    pause_s: float
    root: bytes
    version: Version = BASE_VERSION
    preemptible: bool = True
    continuous_batching: bool = True
    room: Room = NO_ROOM_TOLD
    scores: bool = False
    abilities: frozenset[str] = frozenset()
    adapters: dict[str, Version] = field(default_factory=dict)
    kind: str = "modelled"
    ready: bool = True

    def __post_init__(self) -> None:
        self._position = 0.0
        """Tokens that a sequence running since the start would have had at `_since`, or has now during a pause."""
        self._since: float | None = None
        """Time since which the engine generates; None during a pause."""
        self._applied: list[tuple[Version, float]] = [(self.version, 0.0)]
        """Versions, and the position at which each began."""
        self._news = trio.Event()
        self._running: dict[int, tuple[float, list[int]]] = {}
        """For each flight (one call of `generate`): the position at its start, and the lengths of its completions."""
        self._flight = 0
        self._ended = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def drawn(self) -> int:
        """All tokens generated so far, used or not."""
        return self._ended + sum(self._generated(flight) for flight in self._running)

    @property
    def busy_s(self) -> float:
        """Seconds in which the engine has generated so far."""
        self._count_busy()
        return self._busy_s

    def _count_busy(self) -> None:
        """Add the time since the last call to the busy time. Called whenever generation may start or stop."""
        now = trio.current_time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if self._running and self._since is not None else None

    def _generated(self, flight: int) -> int:
        start, lengths = self._running[flight]
        generated = int(self._now - start + 1e-6)
        return sum(min(generated, length) for length in lengths)

    @property
    def _now(self) -> float:
        since = self._since
        return self._position if since is None else self._position + (trio.current_time() - since) * self.tokens_s

    async def wait_ready(self) -> None:
        if self._since is None and self._position == 0.0:
            self._since = trio.current_time()
        await trio.lowlevel.checkpoint()

    wait_up = wait_ready

    def lacks(self, version: Version) -> bool:
        return self.version < version

    def length(self, prompt: Prompt, sampling: SamplingParams) -> int:
        """Return the number of tokens of this prompt's completion, the same on every node."""
        wanted = self.mean * (1 + self.spread * random.Random(prompt.stream).uniform(-1, 1))
        return min(sampling.max_tokens, max(1, round(wanted)))

    async def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        counts: Counts | None = None,
        adapter: str = "",
        draws: Draws | None = None,
    ) -> tuple[list[Completion], float]:
        """As `EngineHost.generate`: returns when the longest completion has ended. The engine does not name the ability
        `STREAMS`: it never calls `draws`."""
        began, start = trio.current_time(), self._now
        lengths = [self.length(prompt, sampling) for prompt in prompts]
        self._flight += 1
        flight = self._flight
        self._running[flight] = (start, lengths)
        self._count_busy()
        try:
            while (left := start + max(lengths) - self._now) > 1e-6:
                news = self._news
                wait_s = REPORT_EVERY_S if self._since is None else min(REPORT_EVERY_S, left / self.tokens_s)
                with trio.move_on_after(wait_s):
                    await news.wait()
                if counts is not None:
                    generated = int(self._now - start + 1e-6)
                    counts(tuple(min(generated, length) for length in lengths))
        finally:
            self._ended += self._generated(flight)
            del self._running[flight]
            self._count_busy()
        drawn = zip(prompts, lengths, strict=True)
        return [self._completion(p, n, start, sampling) for p, n in drawn], trio.current_time() - began

    def _completion(self, prompt: Prompt, length: int, start: float, sampling: SamplingParams) -> Completion:
        chance = random.Random(prompt.stream)
        token_ids = [3 + word for word in chance.randbytes(length - 1)]
        stopped = length < sampling.max_tokens
        token_ids.append(STOP if stopped else 3)
        ended = "stop" if stopped else "length"
        return Completion(tuple(token_ids), (LOGPROB,) * length, ended, self._spans(start, length))

    def _spans(self, start: float, length: int) -> tuple[Span, ...]:
        """Return which version generated which tokens of a completion that began at position `start`."""
        begun = [(version, max(0, round(at - start))) for version, at in self._applied]
        own = max(i for i, (_, at) in enumerate(begun) if at == 0)
        parts = [part for part in begun[own:] if part[1] < length]
        ends = [at for _, at in parts[1:]] + [length]
        return tuple(Span(version, at, end) for (version, at), end in zip(parts, ends, strict=True) if end > at)

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams, adapter: str = ""
    ) -> tuple[tuple[float, ...], Version]:
        """Never called: `scores` is False."""
        return (), self.version

    async def judge(self, claim: Claim) -> Judgement:
        """Refused: the engine does not name the ability `JUDGES`."""
        raise EngineFailed("this engine cannot judge", poisoned=False)

    async def set_adapter(
        self, slot: int, config: AdapterConfig, fd: int, version: Version, root: bytes
    ) -> float | None:
        """Refused, as by any engine without adapters."""
        raise EngineFailed("this engine cannot serve adapters", poisoned=False)

    async def drop_adapter(self, slot: int) -> None:
        """Every slot is empty: there is nothing to forget."""
        await trio.lowlevel.checkpoint()

    async def stage(self, patch_fd: int, version: Version) -> float:
        await trio.sleep(self.stage_s)
        return self.stage_s

    async def commit(self, version: Version, root: bytes) -> Commitment | None:
        self._position, self._since = self._now, None
        self._count_busy()
        self._wake()
        await trio.sleep(self.pause_s)
        self.version, self.root = version, root
        self._applied = [*self._applied[-8:], (version, self._position)]
        self._since = trio.current_time()
        self._count_busy()
        self._wake()
        return Commitment(self.pause_s)

    def _wake(self) -> None:
        self._news.set()
        self._news = trio.Event()
