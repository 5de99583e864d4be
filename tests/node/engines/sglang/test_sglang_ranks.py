"""A real SGLang of two tensor-parallel ranks, on CPUs: each rank's part is mapped, changed and
proven, and both ranks draw the same tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.engines.base import SamplingParams
from node.engines.sglang.http import Api
from node.engines.vllm.proof import wrong_blocks
from scenarios.engines.engine_bench import WITHIN_S
from scenarios.engines.sglang_updates import PROMPTS, TOKENS, compare, follow

pytestmark = [pytest.mark.sglang, pytest.mark.long]  # an SGLang of its own, of two ranks


@pytest.fixture(scope="module")
def two(model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from scenarios.engines.sglang_bench import bench

    home = tmp_path_factory.mktemp("two")
    with bench(model, home, python, ranks=2, threads=2) as live:
        yield live


def test_both_ranks_take_each_version_and_hold_a_part_of_it(two: Any):
    assert two.engine.classes.loaded == {}
    before = two.greedy(PROMPTS, TOKENS)
    found = follow(two, 3, 0.3)
    assert found["bits_equal"] == 3
    after = two.greedy(PROMPTS, TOKENS)
    assert before != after
    ranks, blocks = two.engine._attached().ranks, range(two.replica.layout.n_blocks)
    assert sorted(rank.hello.rank for rank in ranks) == [0, 1]
    for one_rank in ranks:  # it holds the norms, and half of each matrix
        missing = wrong_blocks(two.replica, [one_rank], blocks, two.replica.hashes)
        assert 0 < len(missing) < len(blocks)
    assert two.reload() == two.replica.root
    assert two.greedy(PROMPTS, TOKENS) == after, "SGLang's own loader gives both ranks the same weights"


def test_a_request_without_a_seed_draws_the_same_tokens_on_both_ranks(two: Any):
    """Otherwise the ranks would hold the keys of two texts, and log-probabilities would be those of neither."""
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 24, "ignore_eos": True}}
    texts = []
    for _ in range(3):
        answer = Api(two.url).post("/generate", {**body, "return_logprob": True}, WITHIN_S)
        drawn = [(entry[1], entry[0]) for entry in answer["meta_info"]["output_token_logprobs"]]
        tokens, told = zip(*drawn, strict=True)
        np.testing.assert_allclose(two.score((5, 6, 7), tokens, SamplingParams(max_tokens=24)), told, atol=0.15)
        texts.append(tokens)
    assert len(set(texts)) == 3


def test_two_updated_ranks_equal_an_sglang_of_two_ranks_that_loads_the_checkpoint_itself(
    two: Any, python: Path, tmp_path: Path
):
    assert follow(two, 3, 0.01)["bits_equal"] == 3
    found = compare(two, tmp_path, python, ranks=2, threads=2)
    assert found == {"tokens_equal": len(PROMPTS), "logprobs_equal": len(PROMPTS)}
