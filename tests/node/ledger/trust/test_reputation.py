"""Bad nodes: which failures count, how many lead to quarantine, how long it lasts, checks, and release."""

from pathlib import Path

import pytest
from ledger_kit import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    PROMPT,
    ask,
    check_places,
    draw,
    group_id,
    head,
    ledger_at,
    sealed,
    submit,
)
from msgspec.structs import replace

from node.engines.base import SamplingParams
from node.ledger.book import Book
from node.ledger.facts import Quarantined, Released
from node.ledger.messages import Reason, work_hash
from node.ledger.packing import pack_floats, pack_tokens
from node.ledger.trust.checks import tolerated
from node.ledger.trust.reputation import BLAMED

LONG = SamplingParams(max_tokens=512, stop_tokens=(2,), seed=9)


def work(ledger, node, count=64, now=0.0):
    leases = ledger.request_work(node, ask(count), now)
    assert isinstance(leases, list), leases
    return [(lease, sample) for lease in leases for sample in lease.samples]


def long_ledger(n=64, **settings):
    ledger = ledger_at(groups=0, **settings)
    ledger.offer(group_id(0), "s", PROMPT, n, LONG)
    return ledger


def draw_long(lease, sample, tokens, logprob=-1.0):
    return draw(
        lease,
        sample,
        token_ids=tokens,
        logprobs=pack_floats((logprob,) * len(tokens)),
        work=work_hash(lease.group, sample, PROMPT, LONG),
    )


def test_faster_than_any_engine_is_refused():
    ledger = long_ledger(fastest_sequence=1000.0)
    jobs = work(ledger, ALICE)
    tokens = [(*range(10, 210), 3 + i, 2) for i in range(3)]
    assert submit(ledger, jobs[0][0], draw_long(*jobs[0], tokens[0]), 0.1) is Reason.TOO_FAST
    assert submit(ledger, jobs[1][0], draw_long(*jobs[1], tokens[1]), 0.3) is None
    assert submit(ledger, jobs[2][0], draw_long(*jobs[2], (10, 2)), 0.3) is None, "a short sample proves nothing"
    check_places(ledger)


def test_leases_from_before_a_restart_are_never_too_fast(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = long_ledger()
    (lease, sample), *_ = work(ledger, ALICE)
    book.write(ledger.take_facts())
    again = book.restore(ledger.settings, ledger.head, now=500.0)
    again.member_up(ALICE)
    assert submit(again, lease, draw_long(lease, sample, (*range(10, 300), 2)), 500.001) is None


def test_a_copy_is_refused_and_coincidences_are_not():
    ledger = long_ledger()
    jobs = work(ledger, ALICE)
    story = (*range(10, 110), 2)
    assert submit(ledger, jobs[0][0], draw_long(*jobs[0], story), 9.0) is None
    assert submit(ledger, jobs[1][0], draw_long(*jobs[1], story), 9.0) is Reason.COPIED
    sure = draw_long(*jobs[2], story, logprob=-0.01)
    assert submit(ledger, jobs[2][0], sure, 9.0) is None, "such likely tokens may well repeat"
    short = [draw_long(*jobs[i], (10, 2)) for i in (3, 4)]
    assert [submit(ledger, jobs[3][0], rollout, 9.0) for rollout in short] == [None, None]
    other = work(ledger, BOB)
    assert submit(ledger, other[0][0], draw_long(*other[0], story), 18.0) is Reason.COPIED, "nor another's"


def test_a_discarded_sample_may_be_generated_again_with_the_same_tokens():
    from ledger_kit import head

    ledger = long_ledger(n=1)
    ((lease, sample),) = work(ledger, ALICE)
    story = (*range(10, 110), 2)
    assert submit(ledger, lease, draw_long(lease, sample, story), 9.0) is None
    ledger.advance(head(5))
    (again,) = ledger.request_work(BOB, ask(1, version=5), 20.0)
    rollout = draw(
        again, 0, 5, token_ids=story, logprobs=pack_floats((-1.0,) * 101), work=work_hash(group_id(0), 0, PROMPT, LONG)
    )
    assert submit(ledger, again, rollout, 40.0) is None


@pytest.mark.parametrize("reason", sorted(BLAMED))
def test_too_many_dishonest_results_lead_to_quarantine(reason):
    ledger = ledger_at(n=64, bad_least=8)
    job = work(ledger, ALICE)
    for _ in range(7):
        ledger.quarantine.refuse(ALICE, reason, 1.0)
    assert ledger.nodes[ALICE].reputation.penalty is None
    ledger.quarantine.refuse(ALICE, reason, 1.0)
    assert str(reason) in ledger.nodes[ALICE].reputation.penalty.why
    assert ledger.request_work(ALICE, ask(4), 1.0) is Reason.QUARANTINED
    assert submit(ledger, job[0][0], draw(*job[0]), 1.0) is Reason.QUARANTINED
    assert len(ledger.groups[group_id(0)].free) == 64, "its work goes to other nodes"
    assert ledger.renew(ALICE, job[0][0].id, job[0][0].token, 3, 1.0) is None
    check_places(ledger)


@pytest.mark.parametrize("reason", sorted(set(Reason) - BLAMED - {Reason.WRONG_REWARD}))
def test_failures_of_networks_and_restarts_do_not_count(reason):
    ledger = ledger_at()
    for _ in range(200):
        ledger.quarantine.refuse(ALICE, reason, 1.0)
    assert ledger.nodes[ALICE].reputation.penalty is None
    assert ledger.nodes[ALICE].refused == {reason: 200}


def test_a_few_bad_results_among_many_good_ones_are_forgiven():
    ledger = ledger_at(groups=30, n=8)
    now = 0.0
    for i in range(30):
        for lease, sample in work(ledger, ALICE, 8, now):
            rollout = draw(lease, sample, work=bytes(32)) if sample == 0 and i % 2 else draw(lease, sample)
            ledger.submit(ALICE, rollout, sealed(lease, rollout), now)
        now += 10.0
    assert ledger.nodes[ALICE].refused[Reason.WRONG_WORK] > 8
    assert ledger.nodes[ALICE].reputation.penalty is None


def test_hoarding_leases_leads_to_quarantines_that_double():
    ledger = ledger_at(groups=40, n=1, max_deadline_s=20.0, lapsed_least=4, quarantine_s=100.0)
    now = 0.0
    for times in (1, 2):
        for _ in range(4):
            assert len(work(ledger, ALICE, 1, now)) == 1
            now += 20.0
            ledger.tick(now)
        penalty = ledger.nodes[ALICE].reputation.penalty
        assert "ran out" in penalty.why
        assert penalty.until == now + 100.0 * times
        assert ledger.next_deadline() == penalty.until
        ledger.tick(penalty.until - 0.1)
        assert ledger.request_work(ALICE, ask(4), now) is Reason.QUARANTINED
        now = penalty.until
        ledger.tick(now)
        assert ledger.nodes[ALICE].reputation.penalty is None
    assert [type(f) for f in ledger.take_facts() if isinstance(f, Quarantined | Released)] == [
        Quarantined,
        Released,
    ] * 2


def test_all_leases_that_expire_with_a_dead_node_count_once():
    ledger = ledger_at(groups=40, n=1, max_deadline_s=20.0, lapsed_least=4)
    assert len(work(ledger, ALICE, 10, 0.0)) == 10
    ledger.tick(20.0)
    assert not ledger.nodes[ALICE].leases
    assert ledger.nodes[ALICE].reputation.penalty is None
    now = 30.0
    for _ in range(3):  # a node that returns and vanishes again
        assert ledger.nodes[ALICE].reputation.penalty is None
        assert len(work(ledger, ALICE, 10, now)) == 10
        now += 20.0
        ledger.tick(now)
    assert "4 of its last 4 leases ran out" in ledger.nodes[ALICE].reputation.penalty.why


def test_a_live_node_whose_leases_expire_hoards_them():
    ledger = ledger_at(groups=40, n=1, max_deadline_s=20.0, lapsed_least=4)
    held = tuple(lease.id for lease, _ in work(ledger, ALICE, 4, 0.0))
    ledger.request_work(ALICE, ask(0, holding=held), 19.0)
    ledger.tick(20.0)
    assert "4 of its last 4 leases ran out" in ledger.nodes[ALICE].reputation.penalty.why


def test_an_expired_lease_with_progress_does_not_count():
    ledger = ledger_at(groups=40, n=1, max_deadline_s=20.0, lapsed_least=4)
    now = 0.0
    for _ in range(12):
        ((lease, _),) = work(ledger, ALICE, 1, now)
        assert ledger.renew(ALICE, lease.id, lease.token, 2, now) == 20.0
        now += 20.0
        ledger.tick(now)
    assert ledger.nodes[ALICE].reputation.penalty is None


def test_quarantine_outlives_a_restart_and_so_does_release(tmp_path: Path):
    book = Book(tmp_path / "ledger.sqlite")
    ledger = ledger_at()
    ledger.quarantine.quarantine(ALICE, "it lied", None, 0.0)
    ledger.quarantine.quarantine(BOB, "it was slow", 50.0, 0.0)
    ledger.quarantine.quarantine(CAROL, "by hand", None, 0.0)
    assert ledger.quarantine.release(CAROL, "a mistake")
    assert not ledger.quarantine.release(DAVE, "never there")
    book.write(ledger.take_facts())
    again = book.restore(ledger.settings, ledger.head, now=1000.0)
    assert again.nodes[ALICE].reputation.penalty.until is None
    assert again.nodes[BOB].reputation.penalty.until == 1050.0
    assert again.nodes[CAROL].reputation.penalty is None
    assert again.nodes[CAROL].reputation.times == 1
    assert [(e["what"], e["why"]) for e in book.reputation()] == [
        ("quarantined", "it lied"),
        ("quarantined", "it was slow"),
        ("quarantined", "by hand"),
        ("released", "a mistake"),
    ]
    assert [e["what"] for e in book.reputation(CAROL)] == ["quarantined", "released"]


# ------------------------------------------------------------ spot checks


def checked_ledger(**settings):
    """Alice has delivered one sample; every sample is checked."""
    ledger = ledger_at(n=2, check_share=1.0, **settings)
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
    assert submit(ledger, lease, draw(lease, 0), 1.0) is None
    return ledger


def check_of(ledger, node, now=1.0, version=3):
    ledger.request_work(node, ask(0, version=version), now)
    return ledger.quarantine.next_check(node, now)


HONEST, OTHER = (-0.5, -0.5, -0.5), (-0.5, -3.0, -0.5)


@pytest.mark.parametrize(("temperature", "bound"), [(0.0, 0.1), (0.5, 0.2), (1.0, 0.1), (2.0, 0.1)])
def test_a_low_temperature_raises_the_tolerance(temperature, bound):
    assert tolerated(0.1, SamplingParams(max_tokens=1, temperature=temperature)) == pytest.approx(bound)


def test_a_second_node_confirms():
    ledger = checked_ledger()
    assert check_of(ledger, ALICE) is None, "no node checks itself"
    check = check_of(ledger, BOB)
    assert (check.author, check.version, check.start, check.end) == (ALICE, (0, 3), 0, 3)
    assert check_of(ledger, CAROL) is None, "one check at a time"
    ledger.quarantine.answer_check(BOB, check.id, (0, 3), HONEST, 2.0)
    assert ledger.nodes[ALICE].reputation.checked == 1
    assert ledger.quarantine.checks.confirmed == 1
    assert not ledger.quarantine.checks.open


def test_three_nodes_convict_a_liar_two_do_not_and_its_rollouts_are_discarded():
    ledger = checked_ledger()
    check = check_of(ledger, BOB)
    ledger.quarantine.answer_check(BOB, check.id, (0, 3), OTHER, 2.0)
    assert check_of(ledger, CAROL) is check
    ledger.quarantine.answer_check(CAROL, check.id, (0, 3), (-0.5, float("-inf"), -0.5), 3.0)
    assert ledger.nodes[ALICE].reputation.penalty is None, "two that contradict it may collude"
    assert check_of(ledger, DAVE) is check
    ledger.quarantine.answer_check(DAVE, check.id, (0, 3), OTHER, 3.0)
    penalty = ledger.nodes[ALICE].reputation.penalty
    assert penalty.until is None
    assert "3 nodes" in penalty.why
    assert ledger.groups[group_id(0)].free == {0, 1}, "the samples that it delivered are generated again"
    check_places(ledger)


def test_a_lying_scorer_is_convicted():
    ledger = checked_ledger()
    check = check_of(ledger, BOB)
    ledger.quarantine.answer_check(BOB, check.id, (0, 3), OTHER, 2.0)
    erin = b"e" * 32
    ledger.member_up(erin)
    for node in (CAROL, DAVE, erin):
        assert ledger.nodes[BOB].reputation.penalty is None
        assert check_of(ledger, node) is check
        ledger.quarantine.answer_check(node, check.id, (0, 3), HONEST, 3.0)
    assert ledger.nodes[ALICE].reputation.penalty is None
    assert ledger.nodes[ALICE].reputation.checked == 1
    assert "3 nodes confirmed" in ledger.nodes[BOB].reputation.penalty.why


def test_a_check_that_no_node_can_make_is_given_up():
    ledger = checked_ledger(check_ttl_s=60.0)
    assert check_of(ledger, BOB, version=2) is None, "it has another version"
    check = check_of(ledger, BOB)
    ledger.quarantine.answer_check(BOB, check.id, (0, 2), HONEST, 2.0)
    assert check_of(ledger, CAROL) is check, "Bob had another version, so its answer does not count"
    ledger.quarantine.answer_check(CAROL, check.id, (0, 3), OTHER, 3.0)
    ledger.tick(61.5)
    assert (ledger.nodes[ALICE].reputation.disputed, ledger.quarantine.checks.given_up) == (1, 1)
    ledger.quarantine.answer_check(DAVE, check.id, (0, 3), OTHER, 62.0)
    assert ledger.nodes[ALICE].reputation.penalty is None


def test_an_engine_that_cannot_score_is_asked_once():
    ledger = checked_ledger()
    check = check_of(ledger, BOB)
    ledger.quarantine.answer_check(BOB, check.id, (0, 3), (), 2.0)
    assert check_of(ledger, BOB) is None
    assert check_of(ledger, CAROL) is check
    ledger.quarantine.answer_check(DAVE, check.id, (0, 3), OTHER, 2.0)
    ledger.quarantine.answer_check(CAROL, 999, (0, 3), OTHER, 2.0)
    assert check.found == {}, "only answers of scorers that were asked count"
    ledger.member_lost(CAROL, 3.0)
    assert check_of(ledger, DAVE) is check


def test_a_node_without_the_version_is_asked_again_at_later_versions():
    ledger = checked_ledger()
    check = check_of(ledger, BOB)
    ledger.quarantine.answer_check(BOB, check.id, (0, 4), (), 2.0)
    assert check_of(ledger, BOB, now=2.0) is None, "not for this check, whose version Bob no longer has"
    assert check_of(ledger, CAROL, now=2.0) is check
    ledger.advance(head(4))
    (lease,) = ledger.request_work(ALICE, ask(1, version=4), 3.0)
    assert submit(ledger, lease, draw(lease, 1, 4), 4.0) is None
    later = check_of(ledger, BOB, now=4.0, version=4)
    assert later is not None
    ledger.quarantine.answer_check(CAROL, check.id, (0, 3), HONEST, 5.0)
    ledger.quarantine.answer_check(CAROL, check.id, (0, 3), (), 5.0)  # for a check that has ended
    assert ledger.nodes[CAROL].scores
    ledger.quarantine.answer_check(BOB, later.id, (0, 4), (), 5.0)
    assert not ledger.nodes[BOB].scores, "it had the version, so its engine cannot score"
    ledger.member_lost(BOB, 6.0)
    assert ledger.nodes[BOB].scores, "it may return with another engine"


def test_the_longest_span_is_checked_and_open_checks_are_bounded():
    from ledger_kit import root

    from node.ledger.messages import VersionSpan

    ledger = ledger_at(n=8, check_share=1.0, checks_open=2)
    (lease,) = ledger.request_work(ALICE, ask(8), 0.0)
    spans = (VersionSpan(0, 2, root(0, 2), 1), VersionSpan(0, 3, root(0, 3), 3))
    for sample in range(4):
        assert submit(ledger, lease, draw(lease, sample, spans=spans), 1.0) is None
    assert [(c.version, c.start, c.end) for c in ledger.quarantine.checks.open.values()] == [((0, 3), 1, 3)] * 2
    check = check_of(ledger, BOB)
    ledger.quarantine.answer_check(BOB, check.id, (0, 3), (-0.5, -0.5), 2.0)
    assert ledger.quarantine.checks.confirmed == 1


def test_about_the_wanted_share_is_checked():
    ledger = ledger_at(groups=100, n=8, check_share=0.1, checks_open=1000)
    for lease, sample in work(ledger, ALICE, 800):
        submit(ledger, lease, draw(lease, sample), 1.0)
    assert 40 <= ledger.quarantine.checks.begun <= 120


def test_fingerprints_include_where_the_prompt_ends():
    ledger = ledger_at(groups=0)
    ledger.offer(group_id(0), "s", pack_tokens((5, 6)), 1, LONG)
    ledger.offer(group_id(1), "s", pack_tokens((5, 6, 7)), 1, LONG)
    (one, two) = [lease for lease, _ in work(ledger, ALICE)]
    story = tuple(range(10, 110))
    for lease, prompt, tokens in ((one, (5, 6), (7, *story, 2)), (two, (5, 6, 7), (*story, 2))):
        hashed = work_hash(lease.group, 0, pack_tokens(prompt), LONG)
        rollout = draw_long(lease, 0, tokens)
        assert submit(ledger, lease, replace(rollout, work=hashed), 9.0) is None
