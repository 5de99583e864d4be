"""An engine that takes the time of one, and draws tokens that mean nothing.

Every sequence that runs gains tokens at one speed, however many run (drawing is bound by reading the weights); a commit
stops all of them for its pause; what was begun goes on under the new version, and its spans say so, as vLLM's do.
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import trio

from node.engines.base import BASE_VERSION, Completion, Prompt, SamplingParams, Span, Version
from node.engines.host import Commitment, Counts

__all__ = ["ModelledEngine", "nothing"]

STOP: Final = 2
"""The token that ends a completion."""
TOLD_EVERY_S: Final = 2.5
"""Interval at which the engine reports its token count: just shorter than the interval of a worker's renewals."""
LOGPROB: Final = -0.5


def nothing() -> int:
    """An open file descriptor of an empty patch. The caller closes it."""
    return os.open(os.devnull, os.O_RDONLY)


@dataclass(eq=False)
class ModelledEngine:
    """A model of an engine. `tokens_s`: tokens per second of one sequence. `mean`, `spread`: of the number of tokens in
    a completion."""

    tokens_s: float
    mean: int
    spread: float
    stage_s: float
    pause_s: float
    root: bytes
    version: Version = BASE_VERSION
    preemptible: bool = True
    continuous_batching: bool = True
    scores: bool = False
    abilities: frozenset[str] = frozenset()
    kind: str = "modelled"
    ready: bool = True

    def __post_init__(self) -> None:
        self._made = 0.0
        """Tokens that a sequence would have which ran from the start."""
        self._since: float | None = None
        """Drawing goes on since then; None: it pauses."""
        self._taken: list[tuple[Version, float]] = [(self.version, 0.0)]
        """Versions, and where in those tokens each began."""
        self._news = trio.Event()
        self._running: dict[int, tuple[float, list[int]]] = {}
        """Where each flight began, and how long its completions become."""
        self._flight = 0
        self._ended = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def drawn(self) -> int:
        """Tokens so far, of whatever became of them."""
        return self._ended + sum(self._made_of(flight) for flight in self._running)

    @property
    def busy_s(self) -> float:
        """Seconds so far in which it drew."""
        self._look()
        return self._busy_s

    def _look(self) -> None:
        """Whether it draws may have changed."""
        now = trio.current_time()
        if self._busy_since is not None:
            self._busy_s += now - self._busy_since
        self._busy_since = now if self._running and self._since is not None else None

    def _made_of(self, flight: int) -> int:
        start, lengths = self._running[flight]
        made = int(self._now - start + 1e-6)
        return sum(min(made, length) for length in lengths)

    @property
    def _now(self) -> float:
        since = self._since
        return self._made if since is None else self._made + (trio.current_time() - since) * self.tokens_s

    async def wait_ready(self) -> None:
        if self._since is None and self._made == 0.0:
            self._since = trio.current_time()
        await trio.lowlevel.checkpoint()

    def length(self, prompt: Prompt, sampling: SamplingParams) -> int:
        """Tokens of this prompt's completion: the same wherever it is drawn."""
        wanted = self.mean * (1 + self.spread * random.Random(prompt.stream).uniform(-1, 1))
        return min(sampling.max_tokens, max(1, round(wanted)))

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, counts: Counts | None = None
    ) -> tuple[list[Completion], float]:
        """As `EngineSeat`: ends when the longest has ended."""
        began, start = trio.current_time(), self._now
        lengths = [self.length(prompt, sampling) for prompt in prompts]
        self._flight += 1
        flight = self._flight
        self._running[flight] = (start, lengths)
        self._look()
        try:
            while (left := start + max(lengths) - self._now) > 1e-6:
                news = self._news
                wait_s = TOLD_EVERY_S if self._since is None else min(TOLD_EVERY_S, left / self.tokens_s)
                with trio.move_on_after(wait_s):
                    await news.wait()
                if counts is not None:
                    made = int(self._now - start + 1e-6)
                    counts(tuple(min(made, length) for length in lengths))
        finally:
            self._ended += self._made_of(flight)
            del self._running[flight]
            self._look()
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
        """Who drew which tokens of a completion that began at `start`."""
        begun = [(version, max(0, round(at - start))) for version, at in self._taken]
        own = max(i for i, (_, at) in enumerate(begun) if at == 0)
        parts = [part for part in begun[own:] if part[1] < length]
        ends = [at for _, at in parts[1:]] + [length]
        return tuple(Span(version, at, end) for (version, at), end in zip(parts, ends, strict=True) if end > at)

    async def score(
        self, prompt: Sequence[int], token_ids: Sequence[int], sampling: SamplingParams
    ) -> tuple[tuple[float, ...], Version]:
        """It says that it cannot (`scores`), and then nobody asks."""
        return (), self.version

    async def stage(self, patch_fd: int, version: Version) -> float:
        await trio.sleep(self.stage_s)
        return self.stage_s

    async def commit(self, version: Version, root: bytes) -> Commitment:
        self._made, self._since = self._now, None
        self._look()
        self._tell()
        await trio.sleep(self.pause_s)
        self.version, self.root = version, root
        self._taken = [*self._taken[-8:], (version, self._made)]
        self._since = trio.current_time()
        self._look()
        self._tell()
        return Commitment(self.pause_s)

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()
