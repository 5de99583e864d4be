"""Which schedule is run next."""

from functools import partial

from scenarios.hunt.coverage import Coverage
from scenarios.hunt.guide import Guide
from scenarios.hunt.schedule import Schedule, draw

FRESH = partial(draw, nodes=3, seconds=60.0, every_s=2.0)


def reached(*events: str) -> Coverage:
    coverage = Coverage()
    for event in events:
        coverage.pairs["member", "dead active resting", event] += 1
    return coverage


def test_without_anything_new_all_schedules_are_fresh() -> None:
    guide = Guide(FRESH, 5)
    for seed in range(5, 25):
        assert guide.next() == (FRESH(seed), None)
        assert guide.learn(FRESH(seed), reached()) == 0


def campaign(runs: int) -> list[tuple[Schedule, int | None]]:
    guide, found = Guide(FRESH, 1), []
    for number in range(runs):
        found.append(guide.next())
        assert guide.learn(found[-1][0], reached("Tick", f"event {min(number, 3)}")) == (
            2 if number == 0 else number < 4
        )
    return found


def test_what_reached_something_new_is_crossed_with_later_seeds() -> None:
    found = campaign(40)
    crossed = [(schedule, parent) for schedule, parent in found if parent is not None]
    assert 8 < len(crossed) < 32
    by_seed = {schedule.seed: schedule for schedule, _ in found}
    for schedule, parent in crossed:
        assert parent in (1, 2, 3, 4)
        ours, theirs = by_seed[parent], FRESH(schedule.seed)
        assert set(schedule.faults) <= set(ours.faults) | set(theirs.faults)
        assert [fault.at_s for fault in schedule.faults] == sorted(fault.at_s for fault in schedule.faults)
        assert (schedule.nodes, schedule.seconds, schedule.retain) == (ours.nodes, ours.seconds, ours.retain)


def test_a_campaign_can_be_repeated() -> None:
    assert campaign(20) == campaign(20)
