"""Draws a sample again, token by token, from the weights that it was drawn from.

The reference engine does what a node does: it draws each token from the text before it, and at a later version's first
token it commits that version and reads the text again. The result is the sample of a transformers engine of the same
arithmetic class, bit for bit, in whatever batch it was drawn, if both name the ability `REPLAYS`. With portable draws
it is the sample of any engine, up to tokens that rounding puts at a tie.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from codec import Layout
from codec.bits import Bits
from node.engines.base import Completion, EngineError, Prompt, SamplingParams, Span, Version
from node.engines.interface import TensorChanges
from node.engines.transformers import TransformersEngine

__all__ = ["Replayed", "TensorBits", "draw_again"]


class TensorBits(Protocol):
    """The bits of one version's tensors."""

    @property
    def root(self) -> bytes: ...

    def bits(self, name: str) -> Bits:
        """A whole tensor, flat."""
        ...


@dataclass(frozen=True, slots=True)
class Replayed:
    """How the tokens drawn again compare with the sample's. `first_difference`: index of the first other token, with
    the token that was drawn there; None: all are equal. `logprob_off`: nats, the largest difference of a
    log-probability before that."""

    tokens: int
    equal: int
    first_difference: int | None
    drawn: int | None
    logprob_off: float

    @property
    def exact(self) -> bool:
        """Every token is equal, and every log-probability is, bit for bit."""
        return self.first_difference is None and self.logprob_off == 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"exact": self.exact}


def draw_again(
    engine: TransformersEngine,
    model: Path,
    layout: Layout,
    weights: Mapping[Version, TensorBits],
    prompt: Prompt,
    sampling: SamplingParams,
    sample: Completion,
) -> Replayed:
    """Draw `sample` again. `model`: a folder with config and tokenizer. `weights`: of each version in its spans.

    Raises `UsageError` when the model cannot be built, `ValueError` when it lacks a token or an option.
    """
    engine.load(model, weights=False)
    engine.attach(layout)
    first = sample.spans[0].version
    engine.reload(weights[first].bits, first, weights[first].root)
    engine.begin(0, [prompt], sampling)
    drawn = next(_completions(engine, layout, weights, sample.spans))
    return _compare(drawn, sample)


def _completions(
    engine: TransformersEngine, layout: Layout, weights: Mapping[Version, TensorBits], spans: tuple[Span, ...]
) -> Iterator[Completion]:
    """The completion that the engine draws, with a commit at the beginning of each later span."""
    begins = {span.start: span.version for span in spans[1:]}
    while True:
        at = engine.counts()[0][0]
        if (version := begins.pop(at, None)) is not None:
            engine.stage(_changes(layout, weights[engine.version], weights[version]))
            engine.commit(version, weights[version].root)
        for _, outcome in engine.step():
            if isinstance(outcome, EngineError):
                raise outcome
            yield outcome[0]


def _changes(layout: Layout, old: TensorBits, new: TensorBits) -> Iterator[TensorChanges]:
    """What differs between two versions, tensor by tensor."""
    for spec in layout.tensors:
        before, after = old.bits(spec.name), new.bits(spec.name)
        where = np.flatnonzero(before != after)
        if where.size:
            yield spec.name, where, after[where]


def _compare(drawn: Completion, sample: Completion) -> Replayed:
    pairs = list(zip(drawn.token_ids, sample.token_ids, strict=False))
    equal = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), len(pairs))
    same = equal == len(sample.token_ids) == len(drawn.token_ids)
    off = np.abs(np.subtract(drawn.logprobs[:equal], sample.logprobs[:equal], dtype=np.float64)).max(initial=0.0)
    return Replayed(
        tokens=len(sample.token_ids),
        equal=equal,
        first_difference=None if same else equal,
        drawn=drawn.token_ids[equal] if not same and equal < len(drawn.token_ids) else None,
        logprob_off=float(off),
    )
