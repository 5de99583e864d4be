"""A real vLLM scores prompts for clients: as it does by itself, and under the version that draws the first token."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codec.staging import StagedChunk, block_hash
from node.engines.base import PROMPT_LOGPROBS, Prompt, SamplingOptions, SamplingParams
from node.engines.prompt_scores import is_scores, read_scores
from scenarios.engines.engine_models import step_of

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PIECE = 16
"""Tokens that it reads in one step."""
LONG = tuple((i * 37 + 11) % 290 + 3 for i in range(300))
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@pytest.fixture(scope="module")
def pieces(untied: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A vLLM that reads a prompt in pieces."""
    from scenarios.engines.engine_bench import SMALL, bench

    flags = (*SMALL, "--max-num-batched-tokens", str(PIECE))
    with bench(untied, tmp_path_factory.mktemp("pieces"), python, threads=1, more=flags) as live:
        yield live


def scored(pieces: Any, prompt: tuple[int, ...], k: int, sampling: SamplingParams = GREEDY) -> Any:
    (completion,) = pieces.generate([Prompt(prompt)], sampling.with_options(prompt_logprobs=k))
    assert is_scores(completion.prompt_scores, len(prompt), k)
    return completion


def far_step_of(replica: Any, seed: int) -> list[StagedChunk]:
    """A step that changes four elements of ten by up to a half, so that rounding is small beside it."""
    blocks = []
    for block in step_of(replica, seed, 0.4)[0].blocks:
        new = replica.block(block.block).copy()
        new[block.positions] = bits = block.bits ^ block.bits.dtype.type(1 << 5)
        blocks.append(replace(block, bits=bits, new_hash=block_hash(new)))
    return [StagedChunk(tuple(blocks))]


def own(completion: Any, k: int = 0) -> np.ndarray:
    return np.array([score.logprob for score in read_scores(completion.prompt_scores, k)])


def test_scores_are_vllms_own(pieces, fresh, untied: Path):
    assert PROMPT_LOGPROBS in pieces.engine.abilities
    prompts = [LONG[:100], LONG[:17], LONG[:16], LONG[5:7]]
    (answers,) = fresh([untied], [list(p) for p in prompts], 3, scored=4, max_num_batched_tokens=PIECE)
    for prompt, (tokens, logprobs, wanted) in zip(prompts, answers, strict=True):
        for _ in range(2):  # the second time, the prefix is in the cache
            completion = scored(pieces, prompt, 4)
            assert list(completion.token_ids) == tokens
            np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-5)
            for token, score, row in zip(prompt[1:], read_scores(completion.prompt_scores, 4), wanted, strict=True):
                at, rank = row[str(token)]
                assert score.logprob == pytest.approx(at, abs=1e-5)
                assert score.rank == rank or score.rank <= 4, "of the likeliest vLLM tells their places instead"
                best = sorted((value for value, _ in row.values()), reverse=True)[:4]
                assert [value for _, value in score.top] == pytest.approx(best, abs=1e-5)
                assert all(row[str(token)][0] == pytest.approx(value, abs=1e-5) for token, value in score.top)
    assert scored(pieces, (7,), 4).prompt_scores == b""
    plain = pieces.generate([Prompt(LONG[:100])], GREEDY)[0]
    assert (plain.token_ids, plain.prompt_scores) == (tuple(answers[0][0]), b"")


def test_they_are_of_the_plain_distribution_whatever_is_asked(pieces):
    options = SamplingOptions(top_k=2, repetition_penalty=2.0, seeded=True)
    how = SamplingParams(max_tokens=3, temperature=0.3, top_p=0.5, seed=4, options=options)
    np.testing.assert_allclose(own(scored(pieces, LONG[:60], 0, how)), own(scored(pieces, LONG[:60], 0)), atol=1e-5)


def test_they_are_of_the_version_that_draws_the_first_token(pieces):
    """A commit falls into the reading of one of the prompts, which begins anew."""
    sampling = GREEDY.with_options(prompt_logprobs=0)
    for attempt in range(6):
        older, before = (0, pieces.version), own(scored(pieces, LONG, 0))
        pieces.stage(far_step_of(pieces.replica, 70 + attempt))
        flights = [pieces.begin([Prompt(LONG, i)], sampling) for i in range(8)]
        while not any(flight.done() for flight in flights):
            time.sleep(0.005)
        pieces.commit()
        done = [flight.result(300) for flight in flights]
        after = own(scored(pieces, LONG, 0))
        assert np.abs(before - after)[:PIECE].max() > 0.4, "the two versions can be told apart in each piece"
        firsts = [completion.spans[0].version for (completion,) in done]
        for first, (completion,) in zip(firsts, done, strict=True):
            wanted = before if first == older else after
            assert np.abs(own(completion) - wanted).max() < 0.2, (first, older)
        if len(set(firsts)) == 2:
            return
    raise AssertionError("no commit ever happened between the first tokens of two prompts")
