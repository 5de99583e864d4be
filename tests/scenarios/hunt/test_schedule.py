"""Schedules of faults: the same for the same seed, stored as they are, and made small."""

from pathlib import Path

import pytest

from scenarios.hunt.schedule import KINDS, SEED, Fault, Schedule, draw, named
from scenarios.hunt.shrink import shrunk


def test_a_seed_decides_its_schedule() -> None:
    assert draw(7, 3, 60.0, 2.0) == draw(7, 3, 60.0, 2.0)
    assert draw(7, 3, 60.0, 2.0) != draw(8, 3, 60.0, 2.0)


def test_every_kind_is_drawn_and_faults_are_in_order() -> None:
    drawn = [draw(seed, 3, 60.0, 1.0) for seed in range(60)]
    assert {fault.kind for schedule in drawn for fault in schedule.faults} == set(KINDS)
    for schedule in drawn:
        times = [fault.at_s for fault in schedule.faults]
        assert times == sorted(times)
        assert times[-1] <= schedule.seconds
        assert 30 <= len(times) <= 180


def test_runs_differ_in_the_kinds_of_their_faults() -> None:
    kinds = [len({fault.kind for fault in draw(seed, 3, 600.0, 1.0).faults}) for seed in range(40)]
    assert min(kinds) < len(KINDS) - 6
    assert max(kinds) == len(KINDS)
    assert {draw(seed, 3, 60.0, 1.0).chunk_bytes for seed in range(40)} == {None, 150}
    assert {draw(seed, 3, 60.0, 1.0).retain for seed in range(40)} == {None, 3}


def test_machines_are_ended_again_while_they_recover() -> None:
    drawn = [fault for seed in range(40) for fault in draw(seed, 3, 60.0, 1.0).faults]
    ends = [fault for fault in drawn if fault.kind in ("kill", "power")]
    soon = [
        fault for fault in ends
        if any(first.where == fault.where and 0.0 <= fault.at_s - first.at_s <= 4.0 for first in ends if first != fault)
    ]  # fmt: skip
    assert len(soon) > len(ends) / 4


def test_a_moment_is_named_without_its_numbers() -> None:
    assert named("before disk:write", "0.12.3") == "before disk:write N.N.N"
    assert named("after disk:rename", "0a" * 32) == "after disk:rename HASH"
    assert named("after Send", "Verdict") == "after Send Verdict"
    assert named("before SendPiece", "") == "before SendPiece"


def test_a_schedule_is_read_as_it_was_written(tmp_path: Path) -> None:
    schedule = draw(3, 2, 30.0, 3.0)
    schedule.write(tmp_path / "schedule.json")
    assert Schedule.read(tmp_path / "schedule.json") == schedule


@pytest.mark.parametrize("needed", [{0}, {5}, {3, 17}, {1, 2, 30}, set()])
def test_what_is_not_needed_is_left_out(needed: set[int]) -> None:
    faults = tuple(Fault(float(number), "kill", SEED) for number in range(32))
    runs = 0

    def fails(candidate: Schedule) -> bool:
        nonlocal runs
        runs += 1
        return needed <= {int(fault.at_s) for fault in candidate.faults} and candidate.nodes >= 2

    small = shrunk(Schedule(1, 4, 100.0, faults), fails)
    assert {int(fault.at_s) for fault in small.faults} == needed
    assert small.nodes == 2
    assert small.seconds < 45.0
    assert runs <= 200


def test_shrinking_ends_after_as_many_runs_as_it_may_make() -> None:
    runs = 0

    def fails(candidate: Schedule) -> bool:
        nonlocal runs
        runs += 1
        return len(candidate.faults) >= 20

    faults = tuple(Fault(float(number), "kill", SEED) for number in range(64))
    small = shrunk(Schedule(1, 1, 100.0, faults), fails, most_runs=15)
    assert runs == 15
    assert len(small.faults) >= 20
