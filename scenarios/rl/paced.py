"""An engine as slow as it is told, for real nodes of different speeds on one machine, and one that lies.

The transformers engine itself, `SCENARIO_TOKENS_S` tokens a second at most, whatever runs. With `SCENARIO_LIES=1` it
says of every token that it was certain. With `SCENARIO_DRAWN=PATH` the number of tokens that it has drawn stands in
that file, those of samples included that were withdrawn in the middle. `scenarios.rl.paced_node` starts a node with it.
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
    """See above."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._tokens_s = float(os.environ["SCENARIO_TOKENS_S"])
        self._lies = os.environ.get("SCENARIO_LIES") == "1"
        self._due = 0.0
        self._drawn = 0
        self._told = os.environ.get("SCENARIO_DRAWN")

    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams) -> None:
        if not self.counts():  # it stood idle: nothing is to be made up for
            self._due = time.monotonic()
        super().begin(flight, prompts, sampling)

    def step(self) -> list[tuple[int, list[Completion]]]:
        before = self._made()
        done = super().step()
        tokens = self._made() + sum(len(c.token_ids) for _, made in done for c in made) - before
        self._drawn += tokens
        if self._told is not None:
            Path(self._told + ".new").write_text(str(self._drawn))
            os.replace(self._told + ".new", self._told)
        self._due = max(self._due, time.monotonic() - 1.0) + tokens / self._tokens_s
        time.sleep(max(0.0, self._due - time.monotonic()))
        return [(flight, [self._said(c) for c in made]) for flight, made in done]

    def _made(self) -> int:
        return sum(map(sum, self.counts().values()))

    def _said(self, true: Completion) -> Completion:
        return msgspec.structs.replace(true, logprobs=(0.0,) * len(true.logprobs)) if self._lies else true
