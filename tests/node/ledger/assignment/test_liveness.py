"""Silent and stalled nodes are found in seconds, while the deadline of a lease may take minutes."""

import math

import pytest
from ledger_kit import ALICE, BOB, PROMPT, SAMPLING, ask, check_places, draw, group_id, head, ledger_at, submit

from node.ledger.assignment.liveness import Liveness
from node.ledger.book import Book
from node.ledger.messages import Reason
from node.ledger.settings import Settings


def take(ledger, node, capacity, now, **request):
    leases = ledger.request_work(node, ask(capacity, **request), now)
    assert isinstance(leases, list), leases
    return leases


def test_a_silent_node_loses_its_work_but_not_its_reputation():
    ledger = ledger_at(groups=20, n=1, silent_s=15.0, doubt_s=2.0, lapsed_least=4)
    leases = take(ledger, ALICE, 20, 0.0)
    assert ledger.next_deadline() == 15.0
    ledger.tick(15.0)
    assert len(ledger.leases) == 20, "it is doubted first"
    assert ledger.next_deadline() == 17.0
    ledger.tick(17.0)
    assert not ledger.leases
    check_places(ledger)
    assert ledger.nodes[ALICE].reputation.penalty is None, "a node that lost its network has not hoarded leases"
    assert submit(ledger, leases[0], draw(leases[0], 0), 18.0) is Reason.EXPIRED
    assert len(take(ledger, ALICE, 20, 19.0)) == 20, "when it is back it may continue"


def test_a_ledger_that_slept_declares_no_node_silent():
    ledger = ledger_at(groups=1, n=1, silent_s=15.0, doubt_s=2.0)
    (lease,) = take(ledger, ALICE, 1, 0.0)
    ledger.tick(100.0)  # the ledger's process slept, and the node's messages are unread
    assert ledger.renew(ALICE, lease.id, lease.token, 1, 100.1) is not None
    ledger.tick(103.0)
    assert lease.id in ledger.leases


def test_after_a_restart_nodes_have_time_to_return(tmp_path):
    ledger = ledger_at(groups=1, n=1)
    take(ledger, ALICE, 1, 0.0)
    with_book = Book(tmp_path / "ledger.sqlite")
    with_book.write(ledger.take_facts())
    again = with_book.restore(Settings(), ledger.head, 1000.0)
    assert again.next_deadline() == 1075.0
    again.tick(1074.0)
    assert again.leases


def test_a_node_that_reports_no_tokens_is_stalled_and_gets_one_group():
    ledger = ledger_at(groups=20, n=1, silent_s=15.0, stall_s=20.0, doubt_s=2.0)
    leases = take(ledger, ALICE, 8, 0.0)
    for now in (3.0, 6.0):
        for lease in leases:
            ledger.renew(ALICE, lease.id, lease.token, round(now / 3), now)
    held = tuple(lease.id for lease in leases)
    for now in (11.0, 16.0, 21.0, 25.9):
        ledger.request_work(ALICE, ask(0, holding=held), now)
        assert len(ledger.leases) == 8
    ledger.tick(26.0)
    ledger.request_work(ALICE, ask(0, holding=held), 27.0)
    ledger.tick(28.0)
    assert not ledger.leases, "twenty seconds without a token, and two of doubt"
    (probe,) = take(ledger, ALICE, 8, 30.0)
    assert ledger.request_work(ALICE, ask(7, holding=(probe.id,)), 31.0) is Reason.NO_WORK
    ledger.renew(ALICE, probe.id, probe.token, 1, 33.0)
    assert len(take(ledger, ALICE, 7, 34.0, holding=(probe.id,))) == 7, "its tokens arrive again"
    check_places(ledger)


def test_an_engine_without_progress_reports_has_until_its_deadline():
    ledger = ledger_at(groups=1, n=1, silent_s=15.0, stall_s=20.0)
    (lease,) = take(ledger, ALICE, 1, 0.0)
    for now in range(5, 300, 5):
        ledger.request_work(ALICE, ask(0, holding=(lease.id,)), float(now))
    assert lease.id in ledger.leases


def test_a_node_with_bursts_of_tokens_has_three_times_its_longest_gap():
    liveness, settings = Liveness(), Settings(silent_s=math.inf, stall_s=20.0, doubt_s=2.0)
    liveness.hear(0.0)
    liveness.begin(0.0)
    liveness.flow(15.0, counted=True)
    assert liveness.check_at(settings) == 15.0 + 45.0
    for i in range(40):
        liveness.flow(16.0 + i, counted=True)
    assert liveness.check_at(settings) > 55.0 + 30.0, (
        "remembered for some minutes, since a later commit will cause such a gap again"
    )
    for i in range(200):
        liveness.flow(56.0 + i, counted=True)
    assert liveness.check_at(settings) == 255.0 + 20.0, "and forgotten"


def test_a_node_that_reports_often_is_declared_silent_sooner():
    liveness, settings = Liveness(), Settings(silent_s=15.0)
    liveness.hear(0.0)
    assert liveness.check_at(settings) == 15.0, "its habits are unknown"
    for now in range(3, 63, 3):
        liveness.hear(now + 0.0)
        liveness.hear(now + 0.1)  # messages for two leases
    assert liveness.check_at(settings) == pytest.approx(60.1 + 9.0)
    liveness.hear(65.0)
    assert liveness.check_at(settings) == pytest.approx(65.0 + 3 * 4.9), "three times its own longest silence"
    for now in (73.0, 74.0):
        liveness.hear(now)
    assert liveness.check_at(settings) == 74.0 + 15.0, "but never later than an unknown node"


def test_a_request_that_was_not_repeated_is_not_served():
    """The service answers waiting requests when work arrives; by then the node that sent one may be gone."""
    ledger = ledger_at(groups=0, fresh_s=8.0)
    request = ask(4)
    assert ledger.request_work(ALICE, request, 0.0) is Reason.NO_WORK
    ledger.offer(group_id(0), "s", PROMPT, 4, SAMPLING)
    assert ledger.request_work(ALICE, request, 8.1, received=0.0) is Reason.NO_WORK
    assert isinstance(ledger.request_work(BOB, ask(4), 8.1, received=8.0), list)


def test_progress_may_restart_from_zero_once_per_version():
    ledger = ledger_at(groups=1, n=1, max_deadline_s=60.0)
    (lease,) = take(ledger, ALICE, 1, 0.0)
    assert ledger.renew(ALICE, lease.id, lease.token, 4, 10.0) == 60.0
    assert ledger.renew(ALICE, lease.id, lease.token, 1, 20.0) == 50.0, "fewer tokens are no progress"
    ledger.advance(head(4))
    assert ledger.renew(ALICE, lease.id, lease.token, 1, 30.0) == 60.0
    assert ledger.renew(ALICE, lease.id, lease.token, 1, 40.0) == 50.0
    assert ledger.renew(ALICE, lease.id, lease.token, 0, 50.0) == pytest.approx(40.0)
