"""An engine of numpy arrays that draws random tokens: it starts within a second, and no two of its samples are alike.

What it draws does not depend on its weights. So a sample that is generated again, or counted twice, is seen by its
tokens; and that the weights are a version's is seen by the root that it proves.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from codec import Layout
from node.engines.base import (
    BASE_VERSION,
    OPTIONS,
    Completion,
    EngineError,
    Prompt,
    SamplingParams,
    Span,
    Version,
)
from node.engines.interface import InProcessEngine, SteppedEngine, TensorChanges
from node.engines.window import places
from scenarios.faults.small_model import CHARACTERS

__all__ = ["DiceEngine"]

TOKEN_S: Final = 0.02
"""Of one step, which draws a token of each sequence."""
_LOGPROB: Final = float(-np.log(len(CHARACTERS)))
_chance = SystemRandom()


@dataclass
class _Row:
    """One sequence: its tokens, and the version that drew each."""

    tokens: list[int] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)

    def completion(self) -> Completion:
        spans = []
        for index, version in enumerate(self.versions):
            if not index or version != self.versions[index - 1]:
                spans.append(Span(version, index, index))
            spans[-1] = Span(version, spans[-1].start, index + 1)
        return Completion(tuple(self.tokens), (_LOGPROB,) * len(self.tokens), "length", tuple(spans))


@dataclass
class _Flight:
    rows: list[_Row]
    length: int


class DiceEngine(InProcessEngine, SteppedEngine):
    """See the module."""

    kind = "dice"
    abilities = frozenset({OPTIONS})

    def __init__(self, *, threads: int | None = None, device: str | None = None) -> None:
        self._layout: Layout | None = None
        self._bits: dict[str, NDArray[Any]] = {}
        self._staged: list[TensorChanges] = []
        self._flights: dict[int, _Flight] = {}
        self.version, self.root, self.poisoned = BASE_VERSION, b"", None

    # ------------------------------------------------------------ weights

    def load(self, folder: Path, *, weights: bool = True) -> None:
        """Nothing is read: the layout says it all."""

    def attach(self, layout: Layout, version: Version = BASE_VERSION, root: bytes = b"") -> None:
        self._layout, self.version, self.root = layout, version, root
        self._bits = {spec.name: np.zeros(spec.elements, spec.type.bits) for spec in layout.tensors}

    def stage(self, changes: Iterable[TensorChanges]) -> None:
        self._staged = []
        self._staged = [(name, indices.copy(), bits.copy()) for name, indices, bits in changes]

    def commit(self, version: Version, root: bytes) -> float:
        began = time.monotonic()
        for name, indices, bits in self._staged:
            self._bits[name][indices] = bits
        self.version, self.root, self._staged = version, root, []
        return time.monotonic() - began

    def reload(self, bits: Callable[[str], NDArray[Any]], version: Version, root: bytes) -> None:
        for name, own in self._bits.items():
            own[:] = bits(name).reshape(-1)
        self.version, self.root, self.poisoned = version, root, None

    def live_hashes(self, layout: Layout) -> NDArray[np.uint8]:
        hashes = np.empty((layout.n_blocks, 32), np.uint8)
        for block in range(layout.n_blocks):
            spec = layout.block(block)
            part = self._bits[spec.name][spec.start : spec.start + spec.count]
            hashes[block] = np.frombuffer(blake3(part.view(np.uint8).data).digest(), np.uint8)
        return hashes

    @property
    def unreadable(self) -> str:
        return ""

    def read_blocks(self, blocks: Sequence[int], window: NDArray[np.uint8]) -> None:
        if self._layout is None:
            raise EngineError("nothing is attached")
        for place in places(self._layout, blocks):
            place.view(window)[:] = self._bits[place.spec.name][place.spec.start :][: place.spec.count]

    # ------------------------------------------------------------ generating

    def begin(self, flight: int, prompts: Sequence[Prompt], sampling: SamplingParams, adapter: str = "") -> None:
        self._flights[flight] = _Flight([_Row() for _ in prompts], sampling.max_tokens)

    def step(self) -> list[tuple[int, list[Completion] | EngineError]]:
        time.sleep(TOKEN_S)
        done: list[tuple[int, list[Completion] | EngineError]] = []
        for number, flight in list(self._flights.items()):
            for row in flight.rows:
                row.tokens.append(_chance.randrange(len(CHARACTERS)))
                row.versions.append(self.version)
            if len(flight.rows[0].tokens) >= flight.length:
                done.append((number, [row.completion() for row in flight.rows]))
                del self._flights[number]
        return done

    def cancel(self, flight: int) -> None:
        self._flights.pop(flight, None)

    def counts(self) -> dict[int, list[int]]:
        return {number: [len(row.tokens) for row in flight.rows] for number, flight in self._flights.items()}
