"""The other ranks' errors name a rank that lags, is alone or dies: real processes over gloo."""

from pathlib import Path

import pytest
from ranks_kit import run_ranks
from seed_kit import FakeSeed, running
from test_fsdp2 import base

pytestmark = pytest.mark.slow


def test_publishing_on_rank_0_only_names_the_others(tmp_path: Path):
    with running(tmp_path, FakeSeed(base())):
        errors = run_ranks(3, "waits_ranks:only_one_publishes", str(tmp_path), 0)[0]
    assert errors[:2] == ["nothing was raised"] * 2
    busy, waited, failed = errors[2:]
    assert busy.startswith("SwarmBusy: Two versions are not sealed yet")
    assert "ranks 1 and 2 of 3, which have not published step 1 (version 2)" in busy
    assert waited.startswith("SwarmTimeout: Step 1 was not sealed within")
    assert "ranks 1 and 2 of 3" in waited
    assert "not published step 1 (version 2) within 2 s of this rank. Every rank must publish" in failed


@pytest.mark.long
def test_publishing_without_rank_0_names_it(tmp_path: Path):
    with running(tmp_path, FakeSeed(base())):
        all_errors = run_ranks(2, "waits_ranks:only_one_publishes", str(tmp_path), 1)[1]
    text = "Rank 0 of 2 has not published step 1 within 1 s of this rank. Every rank must publish each step."
    assert all_errors == [f"SwarmTimeout: {text}"] * 3


@pytest.mark.long
def test_attaching_on_rank_0_only_names_the_others(tmp_path: Path):
    with running(tmp_path, FakeSeed(base())):
        error = run_ranks(3, "waits_ranks:only_one_attaches", str(tmp_path))[0]
    assert error.startswith("SwarmTimeout: Ranks 1 and 2 of 3 have not called Swarm.attach within")


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.long
def test_a_rank_that_is_killed_is_named_at_once(tmp_path: Path, victim: int):
    with running(tmp_path, FakeSeed(base())):
        found = run_ranks(
            3, "waits_ranks:one_is_killed", str(tmp_path), victim, str(tmp_path / "stopped"), dies=(victim,)
        )
    for error in (each[0] for rank, each in enumerate(found) if rank != victim):
        assert f"Rank {victim} of 3" in error
