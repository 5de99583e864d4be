"""The council under faults: some thousand steps here, a million by hand (`python -m scenarios.sim.council`)."""

import pytest

from scenarios.sim.council import TIMING, Violation, World, run
from scenarios.sim.council_bugs import BUGS, steps_to_find


def test_nothing_is_lost_and_never_two_lead() -> None:
    counts, takeovers = run(40_000, seed=1)
    assert counts["crashes"] > 20 and counts["snapshots"] > 2 and counts["leaders"] > 20
    assert counts["established"] > 500
    assert takeovers and sorted(takeovers)[len(takeovers) // 2] < TIMING.takeover_s


@pytest.mark.parametrize("bug", ["a machine that restarts does not wait for a lease", "less than a majority stores"])
def test_a_planted_bug_is_found(bug: str) -> None:
    assert steps_to_find(bug, 300_000) > 0


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_each_planted_bug_is_found(bug: str) -> None:
    assert steps_to_find(bug, 2_000_000) > 0


def test_a_violation_names_the_seed() -> None:
    with pytest.raises(Violation, match="seed 7, step 0"):
        raise World(7).violation("no reason") if World(7).steps == 0 else Violation("seed 7, step 0")
