"""The transformers engine with a limited rate, for real nodes of different speeds on one machine.

It generates at most `SCENARIO_TOKENS_S` tokens a second in total. With `SCENARIO_LIES=1` it reports a probability of 1
for every token. With `SCENARIO_DRAWN=PATH` it writes the number of tokens that it has generated to that file, including
those of samples that were cancelled. `scenarios.rl.paced_node` starts a node with this engine.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from node.engines.base import Completion, EngineError, Prompt, SamplingParams
from node.engines.transformers import TransformersEngine

__all__ = ["PacedEngine"]


class PacedEngine(TransformersEngine):
    """See the module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tokens_s = float(os.environ["SCENARIO_TOKENS_S"])
        self._lies = os.environ.get("SCENARIO_LIES") == "1"
        self._due = 0.0
        self._drawn = 0
        self._count_file = os.environ.get("SCENARIO_DRAWN")

    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> None:
        if not self.counts():  # it was idle, so no tokens are owed
            self._due = time.monotonic()
        super().begin(flight, prompts, sampling, adapter)

    def step(self) -> list[tuple[int, list[Completion] | EngineError]]:
        before = {flight: sum(counts) for flight, counts in self.counts().items()}
        outcomes = super().step()
        after = {flight: sum(counts) for flight, counts in self.counts().items()}
        for flight, outcome in outcomes:  # the last step drew no token of a flight that could not be continued
            is_lost = isinstance(outcome, EngineError)
            after[flight] = before[flight] if is_lost else sum(len(completion.token_ids) for completion in outcome)
        tokens = sum(after.values()) - sum(before.values())
        self._drawn += tokens
        if self._count_file is not None:
            Path(self._count_file + ".new").write_text(str(self._drawn))
            os.replace(self._count_file + ".new", self._count_file)
        self._due = max(self._due, time.monotonic() - 1.0) + tokens / self._tokens_s
        time.sleep(max(0.0, self._due - time.monotonic()))
        return [(flight, self._reported(outcome)) for flight, outcome in outcomes]

    def _reported(self, true: list[Completion] | EngineError) -> list[Completion] | EngineError:
        if isinstance(true, EngineError) or not self._lies:
            return true
        return [msgspec.structs.replace(one, logprobs=(0.0,) * len(one.logprobs)) for one in true]
