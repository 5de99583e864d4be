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

from node.engines.base import Completion, Prompt, SamplingParams
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

    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        if not self.counts():  # it was idle, so no tokens are owed
            self._due = time.monotonic()
        super().begin(flight, prompts, sampling)

    def step(self) -> list[tuple[int, list[Completion]]]:
        before = self._in_flight()
        done = super().step()
        tokens = self._in_flight() + sum(len(c.token_ids) for _, completions in done for c in completions) - before
        self._drawn += tokens
        if self._count_file is not None:
            Path(self._count_file + ".new").write_text(str(self._drawn))
            os.replace(self._count_file + ".new", self._count_file)
        self._due = max(self._due, time.monotonic() - 1.0) + tokens / self._tokens_s
        time.sleep(max(0.0, self._due - time.monotonic()))
        return [(flight, [self._reported(c) for c in completions]) for flight, completions in done]

    def _in_flight(self) -> int:
        return sum(map(sum, self.counts().values()))

    def _reported(self, true: Completion) -> Completion:
        return msgspec.structs.replace(true, logprobs=(0.0,) * len(true.logprobs)) if self._lies else true
