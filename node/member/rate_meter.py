"""How fast this node's engine generates: a self-test to begin with, then the tokens of its work."""

from collections.abc import Callable
from typing import Final

import trio

from node.engines.base import Prompt, SamplingParams
from node.engines.host import EngineFailed, EngineLost
from node.member.engine_client import EngineClient
from node.member.pace import Pace
from node.member.time_accounting import TimeAccounting
from node.settings.event_log import EventLog

__all__ = ["RateMeter"]

WARM_UP: Final = SamplingParams(1)

_log = EventLog(__name__)


class RateMeter:
    """`tokens_per_s`: tokens by the seconds in which at least one sequence was generated, over `Pace.memory_s`."""

    def __init__(
        self, engine: EngineClient, time_accounting: TimeAccounting, pace: Pace, clock: Callable[[], float]
    ) -> None:
        self._engine, self._time_accounting, self._pace, self._clock = engine, time_accounting, pace, clock
        self.tested = not pace.self_test_tokens
        """The self-test is over, so work may be asked for."""
        self.tokens_per_s = 0.0
        self._measured_s = 0.0
        self._unmeasured = 0
        self._generated_s = 0.0

    async def test_self(self, engines: int = 1) -> None:
        """Measure a rate to begin with: one token to warm up, then a few sequences on each of `engines`."""
        rows, tokens = self._pace.self_test_rows, self._pace.self_test_tokens
        if not tokens:
            return
        try:
            with trio.move_on_after(self._pace.self_test_within_s):
                await self._engine.generate([Prompt((0,))], WARM_UP)
                started = self._clock()
                prompts = [Prompt((0,), stream) for stream in range(rows)]
                tokens_made = 0

                async def one() -> None:
                    nonlocal tokens_made
                    completions, _ = await self._engine.generate(prompts, SamplingParams(tokens))
                    tokens_made += sum(len(completion.token_ids) for completion in completions)

                async with trio.open_nursery() as nursery:
                    for _ in range(engines):  # each call goes to the engine that is the least busy
                        nursery.start_soon(one)
                self.tokens_per_s = tokens_made / max(self._clock() - started, 1e-6)
        except* (EngineLost, EngineFailed) as errors:
            _log.warning("self_test_failed", why=str(errors.exceptions[0]))
        self.tested = True

    def count(self, tokens: int) -> None:
        """So many more tokens were generated; they count at the next `measure`."""
        self._unmeasured += tokens

    def measure(self) -> None:
        """Update the rate by what was counted."""
        generated_s = self._time_accounting.seconds["generate"]
        seconds, tokens = generated_s - self._generated_s, self._unmeasured
        if seconds > 0:
            self._generated_s, self._unmeasured = generated_s, 0
            self._measured_s = min(self._measured_s + seconds, self._pace.memory_s)
            self.tokens_per_s += (seconds / max(self._measured_s, seconds)) * (tokens / seconds - self.tokens_per_s)
