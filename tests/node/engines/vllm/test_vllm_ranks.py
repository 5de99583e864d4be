"""Two ranks with tied embeddings: each rank's part is mapped, changed and proven, and the tokens equal a fresh
engine's."""

from pathlib import Path

import pytest

from codec import write_checkpoint
from scenarios.engines.engine_models import step_of

pytestmark = pytest.mark.vllm

PROMPTS = [list(range(3 + i, 40 + i)) for i in range(3)]


@pytest.mark.long
def test_two_updated_ranks_equal_a_fresh_engine_of_two_ranks(two, fresh, tmp_path: Path):
    assert two.engine.classes.loaded == {}
    before = two.greedy(PROMPTS, 16)
    for _ in range(3):
        assert two.update(step_of(two.replica, two.version, 0.3)) > 0
        assert (two.engine.live_hashes() == two.replica.hashes).all()
    after = two.greedy(PROMPTS, 16)
    write_checkpoint(tmp_path / "now", two.replica.layout, two.replica.bits, two.checkpoint.files)
    assert fresh([tmp_path / "now"], PROMPTS, 16, 2) == [after]
    assert before != after


def test_ranks_agree_after_a_reload(two):
    two.advance(step_of(two.replica, 5))
    assert two.reload() == two.replica.root
    assert (two.engine.live_hashes() == two.replica.hashes).all()
