"""Which node gets which work: lags of groups, expected versions, shares, sessions that stay with a node, whole
groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_kit import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    PROMPT,
    SAMPLING,
    ask,
    check_places,
    draw,
    group_id,
    head,
    ledger_at,
    submit,
)

from node.ledger.assignment.fair_share import duration_s, fill_rooms, finish_together, finishable
from node.ledger.assignment.rate import Rate
from node.ledger.assignment.version_timing import VersionTiming
from node.ledger.messages import Reason
from node.ledger.settings import Settings
from node.ledger.state import Node


def samples(leases) -> int:
    return sum(len(lease.samples) for lease in leases) if isinstance(leases, list) else 0


def test_each_group_has_its_own_lag():
    ledger = ledger_at(groups=0)
    for i, lag in enumerate((0, 1, 3)):
        ledger.offer(group_id(i), "s", PROMPT, 2, SAMPLING, max_lag=lag)
    leases = ledger.request_work(ALICE, ask(64, version=0), 0.0)
    assert [lease.group for lease in leases] == [group_id(2)]
    assert leases[0].minimum == (0, 0)
    assert [lease.group for lease in ledger.request_work(BOB, ask(2, version=2), 0.0)] == [group_id(1)]
    assert ledger.request_work(BOB, ask(64, version=2), 1.0) is Reason.TOO_OLD, "only the group without lag is left"
    (sync,) = ledger.request_work(BOB, ask(64, version=3), 2.0)
    assert (sync.group, sync.minimum, sync.samples) == (group_id(0), (0, 3), (0, 1))
    for sample, version, verdict in ((0, 3, None), (1, 2, Reason.TOO_OLD)):
        assert submit(ledger, sync, draw(sync, sample, version), 3.0) is verdict
    for sample in leases[0].samples:
        assert submit(ledger, leases[0], draw(leases[0], sample, 0), 3.0) is None
    ledger.advance(head(4))
    assert ledger.groups[group_id(0)].free == {0, 1}
    assert ledger.hand_over("s") is None
    check_places(ledger)
    assert ledger.groups[group_id(2)].free == {0, 1}, "version 0 is four versions behind now"


def seals(ledger, count, every_s):
    for i in range(count):
        ledger.advance(head(ledger.head.version + 1), every_s * (i + 1))


def test_a_node_behind_the_head_gets_only_work_that_it_can_finish_before_the_next_version():
    ledger = ledger_at(groups=40, n=2, version=1)
    seals(ledger, 3, 100.0)  # at 100, 200 and 300 s; the head is 4, and the next version is due at 400 s
    node = ledger.nodes[ALICE]
    node.rate.observe(4000, 1000.0)  # 4 tokens per second, so one sample per second
    ledger.nodes[BOB].rate.observe(4000, 1000.0)
    ledger.request_work(BOB, ask(0, version=4), 389.0)
    leases = ledger.request_work(ALICE, ask(64, version=3), 390.0)
    assert samples(leases) == 10, "10 s are left of version 3"
    ledger.give_back(ALICE, [lease.id for lease in leases], 390.0)
    assert samples(ledger.request_work(ALICE, ask(64, version=4), 390.0)) == 40, "its share of the work at the head"


def test_a_node_that_could_finish_nothing_waits_for_the_version():
    ledger = ledger_at(groups=20, n=4, version=1)
    seals(ledger, 3, 100.0)
    ledger.nodes[ALICE].rate.observe(4, 100.0)
    assert ledger.request_work(ALICE, ask(64, version=3), 399.0) is Reason.LATE
    assert samples(ledger.request_work(ALICE, ask(64, version=4), 399.5)) > 0


def test_nodes_do_not_wait_for_a_trainer_that_waits_for_rollouts():
    """A version that is overdue is expected after the same time again, so late nodes work although none comes."""
    ledger = ledger_at(groups=20, n=4, version=1)
    seals(ledger, 3, 100.0)
    ledger.nodes[ALICE].rate.observe(4000, 1000.0)
    assert samples(ledger.request_work(ALICE, ask(64, version=3), 460.0)) == 60


def test_more_lag_leaves_more_time():
    ledger = ledger_at(groups=0, version=1)
    for i in range(20):
        ledger.offer(group_id(i), "s", PROMPT, 1, SAMPLING, max_lag=2)
    seals(ledger, 3, 100.0)
    ledger.nodes[ALICE].rate.observe(400, 1000.0)  # ten seconds per sample
    assert samples(ledger.request_work(ALICE, ask(64, version=3), 390.0)) == 11, "110 s are left"


def test_the_version_timing_learns_intervals_and_delays():
    table = VersionTiming()
    assert table.due_s(5.0) == float("inf")
    assert table.usable_s(1, 5.0) == float("inf")
    for i in range(5):
        table.sealed((0, i), 50.0 * i)
        table.arrived(ALICE, (0, i), 50.0 * i + 8.0)
    assert table.interval_s() == pytest.approx(50.0)
    assert table.due_s(210.0) == pytest.approx(40.0)
    assert table.due_s(280.0) == pytest.approx(30.0), "overdue by 30: expected in 30"
    assert table.usable_s(0, 210.0) == pytest.approx(40.0)
    assert table.usable_s(2, 210.0) == pytest.approx(140.0)
    assert table.usable_s(-1, 210.0) == 0.0, "too old now"
    assert table.arrival_s(ALICE, (0, 4), 210.0) == 0.0
    table.sealed((0, 5), 250.0)
    assert table.arrival_s(ALICE, (0, 5), 252.0) == pytest.approx(6.0)
    assert table.arrival_s(BOB, (0, 5), 252.0) is None
    table.forget(ALICE)
    assert table.arrival_s(ALICE, (0, 5), 252.0) is None
    table.sealed((1, 5), 300.0)
    assert table.interval_s() == pytest.approx(50.0), "a rollback does not count as an interval"


def test_deadlines_follow_a_nodes_rate_and_spread():
    settings = Settings(min_deadline_s=1.0, max_deadline_s=1000.0, deadline_slack=3.0)
    steady, shaky = Node(ALICE, outstanding=8), Node(BOB, outstanding=8)
    for i in range(40):
        steady.rate.observe(1000, 10.0)
        shaky.rate.observe(1000 + (400 if i % 2 else -400), 10.0)
    assert duration_s(steady, 100, settings) == pytest.approx(3 * 8 * 100 / 100.0, rel=0.01)
    assert duration_s(shaky, 100, settings) > 2 * duration_s(steady, 100, settings)
    assert duration_s(Node(ALICE, outstanding=8), 100, settings) == 1000.0
    claims = Node(ALICE, rate=Rate(claimed=400.0), outstanding=8)
    assert duration_s(claims, 100, settings) == pytest.approx(3 * 8 * 100 / 400.0), (
        "without measurements the self-test's rate counts"
    )
    assert finishable(Node(ALICE), 10.0, 5.0) == 1
    assert finishable(Node(ALICE, outstanding=3), 10.0, 5.0) == 0
    assert finishable(steady, 10.0, 50.0) == 20 - 8
    steady.token_s.observe(0.3)
    assert finishable(steady, 14.0, 50.0) == 0, "one sample takes 15 s, however many run beside it"
    assert finishable(steady, 16.0, 50.0) == 32 - 8


def test_a_session_stays_with_its_node_while_that_has_room():
    ledger = ledger_at(groups=0, sticky_wait_s=1.0)
    for i, now in enumerate((0.0, 10.0, 20.0)):
        ledger.offer(group_id(i), "s", PROMPT, 1, SAMPLING, affinity=b"left", now=now)
        if i == 0:
            (first,) = ledger.request_work(ALICE, ask(4), now)
            submit(ledger, first, draw(first, 0), now + 1)
        if i == 1:
            ledger.request_work(ALICE, ask(4, holding=()), 9.0)  # it has room, but there is no work yet
            ledger.give_back(ALICE, list(ledger.nodes[ALICE].leases), 9.5)
            assert ledger.request_work(BOB, ask(4), now + 0.5) is Reason.NO_WORK, "kept for Alice"
            assert samples(ledger.request_work(BOB, ask(4), now + 1.1)) == 1, "not for ever"
        if i == 2:
            assert samples(ledger.request_work(BOB, ask(4), now)) == 1, "now Bob has the prefix in its cache"
    check_places(ledger)


def test_a_session_does_not_wait_for_a_node_that_is_gone_or_full():
    ledger = ledger_at(groups=0)
    ledger.offer(group_id(0), "s", PROMPT, 1, SAMPLING, affinity=b"left", now=0.0)
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
    ledger.offer(group_id(1), "s", PROMPT, 1, SAMPLING, affinity=b"left", now=1.0)
    assert samples(ledger.request_work(BOB, ask(1), 1.0)) == 1, "Alice is full"
    ledger.offer(group_id(2), "s", PROMPT, 1, SAMPLING, affinity=b"left", now=2.0)
    ledger.member_lost(BOB, 2.0)
    assert samples(ledger.request_work(ALICE, ask(4, holding=(lease.id,)), 2.0)) == 2


def learn_arrivals(ledger, delays_s: dict[bytes, float], every_s: float = 100.0, until: int = 6) -> float:
    """Seal versions up to `until` and let each node's engine get them after its delay; return the time of the last
    seal. All nodes generate one sample of 4 tokens per second."""
    ledger.assigner.length.observe(4)
    now = 0.0
    for node in delays_s:
        ledger.nodes[node].rate.observe(4000, 1000.0)
    for version in range(ledger.head.version + 1, until + 1):
        now += every_s
        ledger.advance(head(version), now)
        for node, delay_s in delays_s.items() if version < until else ():
            ledger.request_work(node, ask(0, version=version), now + delay_s)
    return now


def test_a_node_that_waits_for_a_version_gets_less_work():
    """Two equal nodes have work for 40 s: the one that begins 10 s later gets 10 s less of it."""
    ledger = ledger_at(groups=0, version=1, max_lag=0)
    for i in range(80):
        ledger.offer(group_id(i), "s", PROMPT, 1, SAMPLING)
    now = learn_arrivals(ledger, {ALICE: 0.0, BOB: 10.0})
    assert ledger.request_work(BOB, ask(64, version=5), now) is Reason.TOO_OLD
    assert samples(ledger.request_work(ALICE, ask(64, version=6), now)) == 45, "all work is done 45 s after the seal"
    assert samples(ledger.request_work(BOB, ask(64, version=6), now + 10.0)) == 35, "Bob also ends 45 s after the seal"


def test_a_node_whose_version_still_counts_gets_its_full_share():
    ledger = ledger_at(groups=0, version=1)
    for i in range(80):
        ledger.offer(group_id(i), "s", PROMPT, 1, SAMPLING, max_lag=1)
    now = learn_arrivals(ledger, {ALICE: 0.0, BOB: 10.0})
    assert samples(ledger.request_work(BOB, ask(0, version=5), now)) == 0
    assert samples(ledger.request_work(ALICE, ask(64, version=6), now)) == 40, "a half, since Bob works meanwhile"


def test_a_node_that_gets_versions_late_gets_work_for_its_present_version_only():
    """Versions are 100 s apart and reach Alice 150 s after their seal, when the next one is already sealed."""
    ledger = ledger_at(groups=0, version=1)
    for i in range(400):
        ledger.offer(group_id(i), "s", PROMPT, 1, SAMPLING, max_lag=1)
    now = learn_arrivals(ledger, {ALICE: 0.0, BOB: 0.0})
    ledger.assigner.version_timing.delays[ALICE].mean = 150.0
    assert samples(ledger.request_work(ALICE, ask(400, version=6), now + 90.0)) == 110, (
        "the last 10 s, and one interval"
    )
    assert samples(ledger.request_work(BOB, ask(400, version=6), now + 90.0)) > 110
    ledger.nodes[ALICE].rate.observe(1, 1e9)
    ledger.give_back(ALICE, list(ledger.nodes[ALICE].leases), now + 90.0)
    assert samples(ledger.request_work(ALICE, ask(400, version=6), now + 90.0)) == 1, (
        "too slow for any sample, so it gets one to try"
    )


@pytest.mark.parametrize(
    ("waits", "work", "expected"),
    [
        ((0.0, 0.0), 30.0, [20.0, 10.0]),
        ((0.0, 10.0), 60.0, [140 / 3, 40 / 3]),
        ((0.0, 10.0), 10.0, [10.0, 0.0]),
        ((20.0, 10.0), 10.0, [0.0, 10.0]),
        ((5.0, 5.0), 0.0, [0.0, 0.0]),
    ],
)
def test_all_nodes_finish_at_the_same_time(waits, work, expected):
    """The nodes' speeds are 2 and 1."""
    assert finish_together((2.0, 1.0), waits, work) == pytest.approx(expected)


@given(
    nodes=st.lists(st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 1000.0)), min_size=1, max_size=20),
    work=st.floats(0.1, 1e5),
)
def test_all_work_is_assigned_and_cannot_finish_sooner(nodes, work):
    speeds, waits = zip(*nodes, strict=True)
    amounts = finish_together(speeds, waits, work)
    assert sum(amounts) == pytest.approx(work, rel=1e-6)
    ends = [wait + amount / speed for speed, wait, amount in zip(speeds, waits, amounts, strict=True) if amount > 0]
    assert max(ends) == pytest.approx(min(ends), rel=1e-3)
    assert all(wait >= min(ends) * (1 - 1e-6) for wait, amount in zip(waits, amounts, strict=True) if amount == 0)


@pytest.mark.parametrize(
    ("amounts", "rooms", "expected"),
    [
        ((8.0, 1.0), (64, 64), [8.0, 1.0]),
        ((240.0, 30.0), (64, 64), [64.0, 64.0]),
        ((90.0, 20.0, 10.0), (60, 64, 64), [60.0, 40.0, 20.0]),
        ((90.0, 50.0, 10.0), (60, 60, 80), [60.0, 60.0, 30.0]),
        ((0.0, 10.0), (5, 4), [0.0, 4.0]),
    ],
)
def test_excess_amounts_go_to_the_others(amounts, rooms, expected):
    assert fill_rooms(amounts, rooms) == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0.001, 1e4), st.integers(0, 1000)), min_size=1, max_size=20))
def test_no_amount_is_left_while_a_node_has_room(nodes):
    amounts, rooms = zip(*nodes, strict=True)
    got = fill_rooms(amounts, rooms)
    assert sum(got) == pytest.approx(min(sum(amounts), sum(rooms)), rel=1e-6)
    assert all(amount <= room * (1 + 1e-9) for amount, room in zip(got, rooms, strict=True))
    kept = [amount >= min(own, room) * (1 - 1e-9) for amount, own, room in zip(got, amounts, rooms, strict=True)]
    assert all(kept), "no node gets less than its rate earns"


@pytest.mark.parametrize(("max_lag", "slow"), [(1, 64), (0, 24)])
def test_slow_nodes_get_full_work_while_fast_nodes_cannot_hold_all(max_lag, slow):
    """Alice is ten times as fast as Bob, and as many samples are open as back-pressure allows. A synchronous step would
    wait for slow nodes."""
    ledger = ledger_at(groups=0)
    for node, tokens in ((ALICE, 10_000), (BOB, 1000)):
        ledger.nodes[node].rate.observe(tokens, 100.0)
        ledger.request_work(node, ask(64), 0.0)
    for number in range(ledger.room("s", 8)):
        ledger.offer(group_id(number), "s", PROMPT, 8, SAMPLING, max_lag=max_lag)
    assert ledger.pool.samples() == 256
    assert samples(ledger.request_work(ALICE, ask(64), 1.0)) == 64
    assert samples(ledger.request_work(BOB, ask(64), 1.0)) == slow, (
        "all that it can hold, or about a tenth of the open samples"
    )
    check_places(ledger)


def test_the_last_work_is_divided_by_rates_alone():
    """No more work comes, so both nodes should end at the same time."""
    ledger = ledger_at(groups=0)
    for node, tokens in ((ALICE, 10_000), (BOB, 1000)):
        ledger.nodes[node].rate.observe(tokens, 100.0)
        ledger.request_work(node, ask(64), 0.0)
    for number in range(ledger.room("s", 8) - 1):
        ledger.offer(group_id(number), "s", PROMPT, 8, SAMPLING)
    assert samples(ledger.request_work(ALICE, ask(64), 1.0)) == 64
    assert samples(ledger.request_work(BOB, ask(64), 1.0)) == 24, "an eleventh of 248, in whole groups"


def test_samples_that_will_be_offered_are_part_of_the_work():
    """The trainer has announced as many samples as are open, and then none."""
    ledger = ledger_at(groups=0)
    for node, tokens in ((ALICE, 10_000), (BOB, 1000)):
        ledger.nodes[node].rate.observe(tokens, 100.0)
        ledger.request_work(node, ask(64), 0.0)
    for number in range(ledger.room("s", 8)):
        ledger.offer(group_id(number), "s", PROMPT, 8, SAMPLING)
    ledger.expect("s", 256)
    leases = ledger.request_work(BOB, ask(64), 1.0)
    assert samples(leases) == 48, "an eleventh of 512, in whole groups"
    ledger.give_back(BOB, [lease.id for lease in leases], 2.0)
    ledger.expect("s", None)
    assert samples(ledger.request_work(BOB, ask(64), 3.0)) == 64, "a trainer that announces nothing may go on for ever"


def test_a_whole_group_goes_to_one_node_or_waits():
    ledger = ledger_at(groups=0)
    for i in range(3):
        ledger.offer(group_id(i), "s", PROMPT, 8, SAMPLING, whole=True)
    ledger.offer(group_id(3), "s", PROMPT, 2, SAMPLING)
    leases = ledger.request_work(ALICE, ask(12), 0.0)
    assert [(lease.group, len(lease.samples)) for lease in leases] == [(group_id(0), 8), (group_id(3), 2)]
    assert [len(lease.samples) for lease in ledger.request_work(BOB, ask(4), 0.0)] == [8], (
        "alone, although it is more than Bob asked for"
    )
    for sample in range(7):
        assert submit(ledger, leases[0], draw(leases[0], sample, token_ids=(10 + sample, 2)), 1.0) is None
    ledger.give_back(ALICE, [leases[0].id], 2.0)
    (again,) = ledger.request_work(ALICE, ask(1, holding=(leases[1].id,)), 2.0)
    assert (again.group, again.samples) == (group_id(0), (7,))
    check_places(ledger)


def test_groups_stay_with_one_node_where_possible():
    ledger = ledger_at(groups=12, n=8)
    first = ledger.request_work(ALICE, ask(20), 0.0)
    assert [len(lease.samples) for lease in first] == [8, 8], "four more would be half a group"
    held = tuple(lease.id for lease in first)
    assert ledger.request_work(ALICE, ask(4, holding=held), 1.0) is Reason.NO_WORK
    for sample in range(4):
        assert submit(ledger, first[0], draw(first[0], sample, token_ids=(9 + sample, 2)), 2.0) is None
    assert [len(lease.samples) for lease in ledger.request_work(ALICE, ask(8, holding=held), 2.0)] == [8]
    assert [len(lease.samples) for lease in ledger.request_work(BOB, ask(3), 2.0)] == [3], (
        "otherwise it could never work"
    )
    check_places(ledger)


def test_the_rest_of_a_started_group_goes_to_any_node_with_room_first():
    """Three of eight samples were done when their node died; no other node has room for the other five together."""
    ledger = ledger_at(groups=12, n=8)
    (lease,) = ledger.request_work(ALICE, ask(8), 0.0)
    for sample in range(3):
        assert submit(ledger, lease, draw(lease, sample, token_ids=(9 + sample, 2)), 1.0) is None
    held = tuple(lease.id for lease in ledger.request_work(BOB, ask(16), 1.0))
    ledger.member_lost(ALICE, 2.0)
    (rest,) = ledger.request_work(BOB, ask(2, holding=held), 3.0)
    assert (rest.group, rest.samples) == (group_id(0), (3, 4))
    (rest,) = ledger.request_work(CAROL, ask(3), 3.0)
    assert (rest.group, rest.samples) == (group_id(0), (5, 6, 7))
    check_places(ledger)


@pytest.mark.parametrize(("sample_s", "got"), [(9.0, 1), (11.0, Reason.LATE)])
def test_the_rest_of_a_started_group_does_not_wait_for_a_version(sample_s, got):
    """Ten seconds are left of version 3, and Alice already has work for longer."""
    ledger = ledger_at(groups=0, version=1)
    for i in range(20):
        ledger.offer(group_id(i), "s", PROMPT, 2, SAMPLING)
    seals(ledger, 3, 100.0)
    ledger.nodes[ALICE].rate.observe(4, 1.0)
    (lease,) = ledger.request_work(BOB, ask(2, version=4), 380.0)
    held = tuple(lease.id for lease in ledger.request_work(ALICE, ask(20, version=3), 380.0))
    assert submit(ledger, lease, draw(lease, 0, 4), 389.0) is None
    ledger.member_lost(BOB, 390.0)
    ledger.nodes[ALICE].token_s.mean = sample_s / ledger.assigner.length.mean
    found = ledger.request_work(ALICE, ask(4, version=3, holding=held), 390.0)
    assert (found if isinstance(found, Reason) else samples(found)) == got


def test_few_large_groups_are_divided():
    ledger = ledger_at(groups=1, n=64)
    for node in (ALICE, BOB, CAROL, DAVE):
        ledger.nodes[node].rate.observe(1000, 10.0)
        ledger.request_work(node, ask(0), 0.0)
    parts = [samples(ledger.request_work(node, ask(64), 1.0)) for node in (ALICE, BOB, CAROL, DAVE)]
    assert parts == [16, 16, 16, 16]
