"""When an idle connection wakes, pings and gives its peer up."""

import math
from itertools import pairwise

import pytest

from swarm.transport.yamux.cost import PeerBudget
from swarm.transport.yamux.limits import YamuxLimits
from swarm.transport.yamux.watch import Watch

LIMITS = YamuxLimits()


def a_watch(now_s: float, peer: PeerBudget | None = None) -> Watch:
    return Watch(peer or PeerBudget(LIMITS), now_s)


def run(watch: Watch, begin_s: float, end_s: float, answers: bool) -> tuple[list[float], list[float], str]:
    """Act the watcher out: (times of pings, times of wake-ups, why the peer was given up)."""
    now_s, pings, wakes = begin_s, list[float](), list[float]()
    while now_s < end_s:
        wakes.append(now_s)
        if why := watch.overdue(LIMITS, now_s):
            return pings, wakes, why
        if watch.is_ping_due(LIMITS, now_s):
            pings.append(now_s)
            watch.note_ping(now_s)
            if answers:
                watch.note_heard(12, now_s)
        before_s, now_s = now_s, watch.next_look_at_s(LIMITS, now_s)
        assert now_s > before_s
    return pings, wakes, ""


@pytest.mark.parametrize("begin_s", [0.0, 1.3, 999.9])
def test_a_silent_peer_is_given_up_within_twenty_seconds(begin_s: float) -> None:
    for heard_s in (0.0, 3.7, 9.9, 11.0, 27.2):
        watch = a_watch(begin_s)
        run(watch, begin_s, begin_s + heard_s, answers=True)
        watch.note_heard(12, begin_s + heard_s)
        pings, wakes, why = run(watch, begin_s + heard_s, begin_s + heard_s + 60, answers=False)
        assert "nothing heard" in why
        assert len(pings) == 1
        limit_s = LIMITS.ping_interval_s + LIMITS.silence_s
        assert wakes[-1] - begin_s - heard_s <= limit_s + 1e-9
        assert wakes[-1] - pings[0] >= LIMITS.silence_s - 1e-9


def test_an_idle_pair_sends_few_pings_and_wakes_seldom() -> None:
    pings, wakes, why = run(a_watch(0.0), 0.0, 600.0, answers=True)
    assert why == ""
    assert len(pings) <= 600 / (0.75 * LIMITS.ping_interval_s) + 1
    assert len(wakes) <= 2 * len(pings)


def test_a_peer_that_speaks_is_pinged_only_to_measure() -> None:
    watch, pings = a_watch(0.0), list[float]()
    for now in range(600):
        watch.note_heard(300, float(now))
        if watch.is_ping_due(LIMITS, float(now)):
            watch.note_ping(float(now))
            pings.append(float(now))
    gaps = [after - before for before, after in pairwise(pings)]
    assert gaps[0] <= LIMITS.ping_interval_s
    assert max(gaps) <= 60
    assert 9 <= len(pings) <= 16


def test_a_connection_in_use_is_measured_each_interval() -> None:
    watch, pings = a_watch(0.0), list[float]()
    for now in range(600):
        watch.note_heard(1 << 20, float(now))
        if watch.is_ping_due(LIMITS, float(now)):
            watch.note_ping(float(now))
            pings.append(float(now))
    assert max(after - before for before, after in pairwise(pings)) <= LIMITS.ping_interval_s


def test_a_write_that_stalls_is_found_at_its_deadline_although_it_began_while_the_watcher_slept() -> None:
    watch = a_watch(0.0)
    watch.note_ping(0.0)
    limits = YamuxLimits(ping_interval_s=3600.0, silence_s=3600.0)
    now_s = watch.next_look_at_s(limits, 0.0)
    assert now_s <= limits.write_stall_s
    watch.writing_since_s = 5.0
    while not watch.overdue(limits, now_s):
        before_s, now_s = now_s, watch.next_look_at_s(limits, now_s)
        assert now_s > before_s
    assert now_s == 5.0 + limits.write_stall_s
    watch.writing_since_s = math.inf
    assert watch.overdue(limits, now_s) == ""


def test_a_connection_to_a_peer_that_speaks_on_another_one_is_only_measured() -> None:
    peer = PeerBudget(LIMITS)
    idle, busy, pings = a_watch(0.0, peer), a_watch(0.0, peer), list[float]()
    for now in range(600):
        busy.note_heard(300, float(now))
        if idle.is_ping_due(LIMITS, float(now)):
            idle.note_ping(float(now))
            idle.note_heard(12, float(now))
            pings.append(float(now))
    assert max(after - before for before, after in pairwise(pings)) <= 60
    assert len(pings) <= 16


def test_a_path_that_is_dead_while_another_to_the_peer_is_not_is_found_by_a_measurement() -> None:
    peer = PeerBudget(LIMITS)
    idle, busy, now = a_watch(0.0, peer), a_watch(0.0, peer), 0
    while not idle.overdue(LIMITS, float(now)):
        busy.note_heard(300, float(now))
        if idle.is_ping_due(LIMITS, float(now)):
            idle.note_ping(float(now))
            if now < 300:
                idle.note_heard(12, float(now))
        now += 1
    assert 300 < now <= 300 + 60 + LIMITS.silence_s + 1


def test_of_two_ends_one_measures_an_idle_connection() -> None:
    """Each end speaks on another connection meanwhile, so no ping is due to silence."""
    ends, pings = [a_watch(0.0), a_watch(0.0)], [0, 0]
    for now in range(3600):
        for number, (end, other) in enumerate((ends, reversed(ends))):
            end.note_heard(300, float(now))
            if end.is_ping_due(LIMITS, float(now)):
                pings[number] += 1
                end.note_ping(float(now))
                other.note_answered(float(now))
                end.note_heard(12, float(now))
    assert 3600 / 60 <= sum(pings) <= 3600 / 60 + 16


def test_an_end_measures_by_itself_when_the_other_end_does_not_or_the_connection_is_in_use() -> None:
    watch = a_watch(0.0)
    watch.note_answered(0.0)
    assert watch.is_ping_due(LIMITS, 0.0)  # nothing was measured yet
    watch.note_ping(0.0)
    watch.note_answered(9.0)
    watch.note_heard(300, 9.5)
    assert not watch.is_ping_due(LIMITS, 12.0)
    watch.note_heard(1 << 20, 12.0)
    assert watch.is_ping_due(LIMITS, 12.0)


def test_connections_of_one_process_wake_together() -> None:
    """Pings are due at different times, and are sent at the same ones."""
    looks = set()
    for heard_s in (50.1, 50.9, 51.4, 52.2):
        watch = a_watch(0.0)
        watch.note_ping(heard_s - 0.05)
        watch.note_heard(12, heard_s)
        looks.add(watch.next_look_at_s(LIMITS, heard_s))
    assert looks == {60.0}
