"""The trainer's scenario, small: roots and trajectories are equal. Times are not checked."""

import json

import pytest

from scenarios.trainers.overhead import _rows

FOUND = {
    "cost": {"publish_over_copy": 1.02, "first_chunk_at": 0.3},
    "encoding": {"speedup": 1.8},
    "ranks_2": {"roots_equal": True, "same_trajectory": True},
    "ranks_3": {"roots_equal": False, "same_trajectory": True},
}


def test_missed_limits_are_reported() -> None:
    missed = [name for name, _, _, ok in _rows(FOUND) if not ok]
    assert missed == ["diffed at the first piece sent", "roots equal, 3 ranks"]


@pytest.mark.slow
@pytest.mark.long
def test_a_small_run_has_equal_roots_and_masters(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    from scenarios.trainers.overhead import main

    main(["--json", "--tensors", "4", "--blocks", "2", "--steps", "4"])
    found = json.loads(capsys.readouterr().out)
    for world in ("ranks_2", "ranks_3"):
        assert found[world]["roots_equal"]
        assert found[world]["same_trajectory"]
    assert found["cost"]["publish_over_copy"] > 0
    assert 0 < found["cost"]["first_chunk_at"] <= 1
