"""A sample drawn again: the same bits across a commit; another token is named."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from test_transformers import ROOT, changed, checkpoint, engine_on, layout_of

from node.engines.base import Completion, Prompt, SamplingOptions, SamplingParams
from node.engines.replay import draw_again
from node.engines.transformers import TransformersEngine

PROMPT = Prompt((1, 2, 3), 7)
NEXT = b"n" * 32


class Weights:
    def __init__(self, bits: dict[str, np.ndarray], root: bytes) -> None:
        self.root, self._bits = root, bits

    def bits(self, name: str) -> np.ndarray:
        return self._bits[name].reshape(-1)


def sampling(portable: bool) -> SamplingParams:
    return SamplingParams(max_tokens=8, seed=3, options=SamplingOptions(portable=True) if portable else msgspec.UNSET)


def drawn_across_a_commit(
    folder: Path, wanted: SamplingParams, beside: int = 0
) -> tuple[dict[tuple[int, int], Weights], Completion]:
    """`beside`: other prompts in the same batch."""
    bits = checkpoint(folder)
    patch, new = changed(bits)
    engine = engine_on(folder)
    others = [Prompt((4, 5, i), 20 + i) for i in range(beside)]
    engine.begin(0, [PROMPT, *others], wanted)
    done: list[tuple[int, list[Completion]]] = []
    while not done:
        if engine.counts()[0][0] == 3:
            engine.stage(iter(patch))
            engine.commit((0, 1), NEXT)
        done = engine.step()
    return {(0, 0): Weights(bits, ROOT), (0, 1): Weights(new, NEXT)}, done[0][1][0]


@pytest.mark.parametrize(("portable", "beside"), [(False, 0), (True, 0), (False, 1), (True, 8)])
def test_the_same_bits_across_a_commit_in_any_batch(untied_folder: Path, portable: bool, beside: int) -> None:
    wanted = sampling(portable)
    weights, sample = drawn_across_a_commit(untied_folder, wanted, beside)
    assert [span.start for span in sample.spans] == [0, 3]
    layout = layout_of(checkpoint(untied_folder))
    engine = TransformersEngine(threads=1, device="cpu")
    found = draw_again(engine, untied_folder, layout, weights, PROMPT, wanted, sample)
    assert found.exact
    assert (found.tokens, found.equal) == (8, 8)
    assert engine.root == NEXT


def test_another_token_is_named(untied_folder: Path) -> None:
    wanted = sampling(portable=True)
    weights, sample = drawn_across_a_commit(untied_folder, wanted)
    tokens = list(sample.token_ids)
    right = tokens[5]
    tokens[5] = (right + 1) % 8
    forged = msgspec.structs.replace(sample, token_ids=tuple(tokens))
    layout = layout_of(checkpoint(untied_folder))
    found = draw_again(
        TransformersEngine(threads=1, device="cpu"), untied_folder, layout, weights, PROMPT, wanted, forged
    )
    assert (found.equal, found.first_difference, found.drawn) == (5, 5, right)
    assert not found.exact
    assert found.logprob_off == 0.0


def test_a_longer_and_a_shorter_sample_differ_at_their_end(untied_folder: Path) -> None:
    wanted = sampling(portable=True)
    weights, sample = drawn_across_a_commit(untied_folder, wanted)
    span = msgspec.structs.replace(sample.spans[0], end=3)
    shorter = Completion(sample.token_ids[:3], sample.logprobs[:3], "length", (span,))
    layout = layout_of(checkpoint(untied_folder))
    found = draw_again(
        TransformersEngine(threads=1, device="cpu"), untied_folder, layout, weights, PROMPT, wanted, shorter
    )
    assert (found.equal, found.first_difference) == (3, 3)
