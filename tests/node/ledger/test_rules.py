"""The ledger's rules, one situation per test, with numbers in place of a clock."""

import pytest
from ledger_kit import (
    ALICE,
    BOB,
    CAROL,
    DAVE,
    KEY_OF,
    PROMPT,
    SAMPLING,
    ask,
    check_places,
    draw,
    group_id,
    head,
    ledger_at,
    root,
    sealed,
    submit,
)
from msgspec.structs import replace

from node.engines.base import SamplingParams
from node.ledger.binding import KeyTaken
from node.ledger.facts import Accepted, Advanced, Discarded, Dropped, Leased, Offered, Requeued, Taken
from node.ledger.messages import Reason, VersionSpan
from node.ledger.packing import pack_floats, pack_tokens


def one_lease(ledger, node=ALICE, capacity=4, now=0.0, **request):
    leases = ledger.request_work(node, ask(capacity, **request), now)
    assert isinstance(leases, list), leases
    assert len(leases) == 1
    return leases[0]


def test_a_group_is_leased_done_handed_over_and_forgotten():
    ledger = ledger_at(n=4)
    lease = one_lease(ledger)
    assert lease.samples == (0, 1, 2, 3)
    assert lease.minimum == (0, 2)
    for sample in range(4):
        assert ledger.hand_over("s") is None
        assert submit(ledger, lease, draw(lease, sample), 1.0 + sample) is None
        check_places(ledger)
    group = ledger.hand_over("s")
    assert group is not None
    assert sorted(group.done) == [0, 1, 2, 3]
    assert ledger.hand_over("s") is None
    ledger.taken(group.id, 0.0)
    assert not ledger.groups
    assert not ledger.leases
    kinds = [type(fact) for fact in ledger.take_facts() if not isinstance(fact, Advanced)]
    assert kinds == [Offered, Leased, Accepted, Accepted, Accepted, Accepted, Taken]
    assert ledger.take_facts() == []


def test_parts_from_several_nodes_make_one_group():
    ledger = ledger_at(n=4)
    first = one_lease(ledger, ALICE, 1)
    second = one_lease(ledger, BOB, 2)
    assert (first.samples, second.samples) == ((0,), (1, 2))
    for lease in (second, first):
        for sample in lease.samples:
            assert submit(ledger, lease, draw(lease, sample), 1.0) is None
    third = one_lease(ledger, CAROL)
    assert third.samples == (3,)
    assert submit(ledger, third, draw(third, 3), 2.0) is None
    group = ledger.hand_over("s")
    assert {done.node for done in group.done.values()} == {ALICE, BOB, CAROL}


def spans_of(*pairs):
    return tuple(VersionSpan(0, version, root(0, version), end) for version, end in pairs)


@pytest.mark.parametrize(
    ("reason", "change"),
    [
        (Reason.WRONG_WORK, {"work": bytes(32)}),
        (Reason.MALFORMED, {"logprobs": pack_floats((-1.0, -1.0))}),
        (Reason.MALFORMED, {"logprobs": pack_floats((-1.0, float("nan"), -1.0))}),
        (Reason.MALFORMED, {"logprobs": pack_floats((-1.0, 0.5, -1.0))}),
        (Reason.MALFORMED, {"logprobs": b"123"}),
        (Reason.MALFORMED, {"token_ids": b"", "logprobs": b""}),
        (Reason.MALFORMED, {"token_ids": b"12345"}),
        (Reason.MALFORMED, {"token_ids": (8, 9, 10, 11, 2)}),  # longer than requested
        (Reason.MALFORMED, {"token_ids": (8, 2, 2)}),  # continues after a stop token
        (Reason.MALFORMED, {"token_ids": (8, 9, 10)}),  # reports "stop" without a stop token
        (Reason.MALFORMED, {"finish_reason": "length"}),  # reports "length", but is shorter
        (Reason.MALFORMED, {"spans": spans_of((3, 2))}),
        (Reason.MALFORMED, {"spans": spans_of((3, 4))}),
        (Reason.MALFORMED, {"spans": spans_of((2, 0), (3, 3))}),
        (Reason.MALFORMED, {"spans": spans_of((3, 1), (2, 3))}),
        (Reason.TOO_OLD, {"spans": spans_of((1, 3))}),
        (Reason.TOO_OLD, {"spans": spans_of((1, 1), (3, 3))}),  # one old token is enough
        (Reason.TOO_NEW, {"spans": spans_of((3, 1), (4, 3))}),
        (Reason.TOO_NEW, {"spans": (VersionSpan(1, 0, root(1, 0), 3),)}),
        (Reason.WRONG_ROOT, {"spans": (VersionSpan(0, 3, bytes(32), 3),)}),
    ],
)
def test_a_bad_result_is_refused_counted_and_its_sample_requeued(reason, change):
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    rollout = draw(lease, 0, **change)
    assert submit(ledger, lease, rollout, 1.0) is reason
    assert submit(ledger, lease, rollout, 1.5) is reason, "the same bytes get the same verdict"
    assert ledger.nodes[ALICE].refused == {reason: 1}
    assert ledger.groups[group_id(0)].free == {0}
    check_places(ledger)
    again = one_lease(ledger, BOB)
    assert again.samples == (0,)
    assert again.token > lease.token
    assert submit(ledger, again, draw(again, 0), 2.0) is None
    assert submit(ledger, lease, draw(lease, 1), 2.0) is None, "the rest of the lease is still valid"
    assert ledger.hand_over("s") is not None


def test_lag_within_the_bound_is_accepted():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    assert submit(ledger, lease, draw(lease, 0, 2), 1.0) is None
    assert submit(ledger, lease, draw(lease, 1, spans=spans_of((2, 1), (3, 3))), 1.0) is None


def test_without_lag_only_the_head_counts():
    ledger = ledger_at(n=2, max_lag=0)
    assert ledger.request_work(ALICE, ask(4, version=2), 0.0) is Reason.TOO_OLD
    lease = one_lease(ledger)
    assert submit(ledger, lease, draw(lease, 0, 2), 1.0) is Reason.TOO_OLD
    assert submit(ledger, lease, draw(lease, 1, 3), 1.0) is None


def test_unknown_and_foreign_leases_and_wrong_tokens():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    assert submit(ledger, lease, replace(draw(lease, 0), lease=999), 1.0) is Reason.UNKNOWN_LEASE
    assert submit(ledger, lease, draw(lease, 0, token=lease.token + 1), 1.0) is Reason.FENCED
    assert submit(ledger, lease, draw(lease, 0), 1.0, node=BOB) is Reason.WRONG_NODE
    assert submit(ledger, lease, draw(lease, 7), 1.0) is Reason.WRONG_WORK
    check_places(ledger)
    assert submit(ledger, lease, draw(lease, 0), 1.0) is None, "none of these harmed the lease's owner"


def test_expiry_requeues_and_a_late_result_is_refused():
    ledger = ledger_at(n=2, max_deadline_s=20.0)
    lease = one_lease(ledger)
    assert ledger.next_deadline() == 20.0
    ledger.tick(19.9)
    assert lease.id in ledger.leases
    late = draw(lease, 0)
    assert submit(ledger, lease, late, 20.0) is Reason.EXPIRED
    assert ledger.next_deadline() is None
    check_places(ledger)
    other = one_lease(ledger, BOB, now=21.0)
    assert other.samples == (0, 1)
    assert submit(ledger, other, draw(other, 0), 22.0) is None
    assert submit(ledger, lease, late, 23.0) is Reason.EXPIRED
    assert len(ledger.groups[group_id(0)].done) == 1


def test_a_repeated_result_is_accepted_once():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    rollout = draw(lease, 0)
    for now in (1.0, 2.0, 3.0):
        assert submit(ledger, lease, rollout, now) is None
    assert ledger.nodes[ALICE].accepted == 1
    assert submit(ledger, lease, draw(lease, 0, token_ids=(9, 2)), 4.0) is Reason.DUPLICATE
    assert submit(ledger, lease, draw(lease, 1), 5.0) is None
    ledger.taken(ledger.hand_over("s").id, 0.0)
    assert submit(ledger, lease, rollout, 6.0) is None, "also after the group is gone"
    assert ledger.nodes[ALICE].accepted == 2


def test_a_lost_node_loses_its_work_and_may_not_deliver():
    ledger = ledger_at(n=4)
    lease = one_lease(ledger)
    assert submit(ledger, lease, draw(lease, 0), 1.0) is None
    ledger.member_lost(ALICE, 2.0)
    check_places(ledger)
    assert ledger.groups[group_id(0)].free == {1, 2, 3}
    assert submit(ledger, lease, draw(lease, 1), 3.0) is Reason.NOT_A_MEMBER
    assert ledger.request_work(ALICE, ask(4), 3.0) is Reason.NOT_A_MEMBER
    assert ledger.renew(ALICE, lease.id, lease.token, 3, 3.0) is None
    ledger.member_up(ALICE)
    assert submit(ledger, lease, draw(lease, 1), 3.0) is Reason.NOT_A_MEMBER, "its old lease stays invalid"
    assert one_lease(ledger).samples == (1, 2, 3)


def test_renewal_needs_progress():
    ledger = ledger_at(n=2, max_deadline_s=20.0)
    lease = one_lease(ledger)
    assert ledger.renew(ALICE, lease.id, lease.token, 2, 15.0) == 20.0
    assert ledger.renew(ALICE, lease.id, lease.token, 2, 18.0) == 17.0, "without new tokens the deadline stays"
    assert ledger.renew(ALICE, lease.id, lease.token, 9, 18.0) == 17.0, "more tokens than the samples can have"
    assert ledger.renew(BOB, lease.id, lease.token, 3, 18.0) is None
    assert ledger.renew(ALICE, lease.id, lease.token + 1, 3, 18.0) is None
    assert ledger.renew(ALICE, lease.id, lease.token, 8, 34.0) == 20.0
    assert ledger.renew(ALICE, lease.id, lease.token, 8, 54.0) is None
    assert ledger.groups[group_id(0)].free == {0, 1}


def test_a_node_gives_back_only_its_own_leases_at_once():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    ledger.give_back(BOB, [lease.id], 1.0)
    assert lease.id in ledger.leases
    ledger.give_back(ALICE, [lease.id, 77], 1.0)
    check_places(ledger)
    assert one_lease(ledger, BOB).samples == (0, 1)


def test_members_that_refuse_everything_do_not_make_work_impossible():
    """Regression: three such members made the ledger report that no node could do the work, which ended the trainer's
    session."""
    ledger = ledger_at(3, groups=1, n=1)
    (busy,) = ledger.request_work(DAVE, ask(1), 1.0)
    ledger.offer(group_id(1), "s", PROMPT, 1, SAMPLING)
    for node in (ALICE, BOB, CAROL):
        (lease,) = ledger.request_work(node, ask(4), 2.0)
        assert ledger.refuse_work(node, lease.id, lease.token, 2.0) is None
    assert submit(ledger, busy, draw(busy, 0), 3.0) is None
    (lease,) = ledger.request_work(DAVE, ask(1), 3.0)
    assert (lease.group, submit(ledger, lease, draw(lease, 0), 4.0)) == (group_id(1), None)


def test_work_is_impossible_when_every_node_that_generates_has_refused_it():
    ledger = ledger_at(3, groups=1, n=1)
    (lease,) = ledger.request_work(DAVE, ask(4), 1.0)
    ledger.give_back(DAVE, (lease.id,), 1.0)  # and sends nothing afterwards
    late, found = 2.0 + ledger.settings.asking_ttl_s, []
    for node in (ALICE, BOB, CAROL):
        (lease,) = ledger.request_work(node, ask(4), late)
        found.append(ledger.refuse_work(node, lease.id, lease.token, late))
    assert [group and group.id for group in found] == [None, None, group_id(0)]


def test_a_lost_lease_is_sent_again():
    ledger = ledger_at(n=2, resend_after_s=5.0)
    lease = one_lease(ledger)
    assert ledger.request_work(ALICE, ask(4), 1.0) is Reason.NO_WORK, "it may still be on its way"
    assert ledger.request_work(ALICE, ask(4, holding=(lease.id,)), 9.0) is Reason.NO_WORK
    assert ledger.request_work(ALICE, ask(4), 9.0) == [lease]
    assert len(ledger.leases) == 1


def test_leases_on_their_way_count_as_held():
    """A node that asks again before its last leases have arrived gets no more than it can hold."""
    ledger = ledger_at(n=2, groups=8, resend_after_s=5.0)
    granted = []
    for now in (0.0, 0.1, 0.2):
        found = ledger.request_work(ALICE, ask(4), now)
        granted += found if isinstance(found, list) else []
        check_places(ledger)
    assert sum(len(lease.samples) for lease in granted) == 4
    assert ledger.capacity == 4
    more = ledger.request_work(ALICE, ask(2, holding=(granted[0].id,)), 0.3)
    assert more is Reason.NO_WORK, "it has received one of two leases, and has room for the other"


def test_an_overtaken_request_is_ignored():
    ledger = ledger_at(n=2)
    old = ask(4)
    ledger.request_work(ALICE, ask(0), 1.0)
    assert ledger.request_work(ALICE, old, 2.0) is Reason.NO_WORK
    assert ledger.nodes[ALICE].capacity == 0


def test_an_engine_at_the_wrong_version_gets_no_work():
    ledger = ledger_at(version=3)
    assert ledger.request_work(ALICE, ask(4, version=1), 0.0) is Reason.TOO_OLD
    assert ledger.request_work(ALICE, ask(4, version=4), 0.0) is Reason.TOO_NEW
    wrong = ask(4)
    assert ledger.request_work(ALICE, type(wrong)(wrong.serial, 4, 0, 3, bytes(32), 0.0, ()), 0.0) is Reason.WRONG_ROOT
    assert one_lease(ledger, version=2).samples == (0, 1, 2, 3)


def test_accepted_rollouts_that_become_too_old_are_discarded():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    assert submit(ledger, lease, draw(lease, 0, 2), 1.0) is None
    assert submit(ledger, lease, draw(lease, 1, 3), 1.0) is None
    ledger.advance(head(4))  # version 2 is too old now, although the group was complete
    check_places(ledger)
    assert ledger.hand_over("s") is None
    again = one_lease(ledger, BOB, version=4)
    assert again.samples == (0,)
    assert submit(ledger, again, draw(again, 0, 4), 2.0) is None
    group = ledger.hand_over("s")
    ledger.advance(head(9))
    assert group.complete, "a group on its way to the trainer stays complete"
    assert [fact for fact in ledger.take_facts() if isinstance(fact, Discarded)] == [
        Discarded(group_id(0), 0, "version too old")
    ]


def test_a_rollback_discards_rollouts_of_the_old_epoch():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    assert submit(ledger, lease, draw(lease, 0, 3), 1.0) is None
    ledger.advance(head(2, epoch=1))
    assert ledger.groups[group_id(0)].free == {0}
    assert submit(ledger, lease, draw(lease, 1, 3), 1.0) is Reason.TOO_OLD
    assert ledger.groups[group_id(0)].free == {0, 1}
    assert one_lease(ledger, BOB, version=2, epoch=1).minimum == (1, 1)
    with pytest.raises(ValueError, match="after"):
        ledger.advance(head(9, epoch=0))


def test_dropping_a_group_ends_its_leases():
    ledger = ledger_at(groups=2, n=2)
    first, second = ledger.request_work(ALICE, ask(4), 0.0)
    assert ledger.drop(group_id(0)) == [first]
    assert ledger.drop(group_id(0)) == []
    assert submit(ledger, first, draw(first, 0), 1.0) is Reason.WITHDRAWN
    check_places(ledger)
    assert submit(ledger, second, draw(second, 0), 1.0) is None
    assert submit(ledger, second, draw(second, 1), 1.0) is None
    assert ledger.drop_session("other") == []
    assert ledger.drop_session("s") == []
    assert ledger.hand_over("s") is None
    assert [fact.group for fact in ledger.take_facts() if isinstance(fact, Dropped)] == [group_id(0), group_id(1)]


def test_a_returning_trainer_gets_the_groups_that_it_did_not_take():
    ledger = ledger_at(n=1)
    lease = one_lease(ledger)
    submit(ledger, lease, draw(lease, 0), 1.0)
    group = ledger.hand_over("s")
    ledger.reopen("s")
    assert ledger.hand_over("s") is group
    ledger.reopen("s")
    ledger.taken(group.id, 0.0)  # the trainer had taken it
    assert ledger.hand_over("s") is None


def test_offers_are_checked_and_idempotent():
    ledger = ledger_at(groups=0)
    with pytest.raises(ValueError, match="n:"):
        ledger.offer(group_id(0), "s", PROMPT, 0, SAMPLING)
    with pytest.raises(ValueError, match="prompt"):
        ledger.offer(group_id(0), "s", b"", 1, SAMPLING)
    with pytest.raises(ValueError, match="prompt"):
        ledger.offer(group_id(0), "s", PROMPT, 1, SamplingParams(max_tokens=1 << 17))
    assert ledger.offer(group_id(0), "s", PROMPT, 1, SAMPLING)
    assert not ledger.offer(group_id(0), "s", PROMPT, 1, SAMPLING)


@pytest.mark.parametrize(
    ("prompt", "n", "sampling", "says"),
    [
        (PROMPT, 5, SAMPLING, "bound to n=1; now it is asked with n=5"),
        (PROMPT[::-1], 1, SAMPLING, r"the prompt=3 tokens with hash \w{8}; now .*the prompt=3 tokens with hash \w{8}"),
        (PROMPT, 1, replace(SAMPLING, temperature=0.5), "temperature=1.0; now it is asked with temperature=0.5"),
    ],
)
def test_other_work_under_a_known_group_is_refused_with_both_named(prompt, n, sampling, says):
    ledger = ledger_at(groups=1, n=1)
    with pytest.raises(KeyTaken, match=f"key 's' is .*{says}.*another key"):
        ledger.offer(group_id(0), "s", prompt, n, sampling)
    assert (ledger.groups[group_id(0)].n, ledger.groups[group_id(0)].prompt) == (1, PROMPT)


def test_room_depends_on_what_nodes_hold_and_the_trainer_takes():
    ledger = ledger_at(groups=0, ahead=2.0, cold_groups=3)
    assert ledger.room("s", 4) == 3
    for i in range(3):
        ledger.offer(group_id(i), "s", PROMPT, 4, SAMPLING)
    assert ledger.room("s", 4) == 0
    leases = ledger.request_work(ALICE, ask(8), 0.0)
    assert sum(len(lease.samples) for lease in leases) == 8
    assert ledger.room("s", 4) == 1, "8 sequences held, so 16 samples open"
    for lease in leases:
        for sample in lease.samples:
            submit(ledger, lease, draw(lease, sample), 1.0)
    assert ledger.room("s", 4) == 1, "complete, but not taken"
    ledger.taken(ledger.hand_over("s").id, 0.0)
    assert ledger.room("s", 4) == 2
    assert ledger.room("other", 4) == 3, "complete groups of another session do not count"


def work_off(ledger, speeds, n_groups, group_n=8, capacity=64):
    """Let each node work off one lease after another at its own speed. Returns the tokens generated by each node, and
    the seconds."""
    now, clocks, made = 0.0, dict.fromkeys(speeds, 0.0), dict.fromkeys(speeds, 0)
    for i in range(n_groups):
        ledger.offer(group_id(i), "s", PROMPT, group_n, SAMPLING)
    ledger.expect("s", 0)
    queue = {node: [] for node in speeds}
    while ledger.groups:
        node = min(clocks, key=lambda key: (clocks[key], key))
        now = clocks[node]
        if not queue[node]:
            leases = ledger.request_work(node, ask(capacity, holding=tuple(ledger.nodes[node].leases)), now)
            if isinstance(leases, Reason):
                clocks[node] += 0.05
                continue
            queue[node] = [(lease, sample) for lease in leases for sample in lease.samples]
        lease, sample = queue[node].pop(0)
        clocks[node] = now = now + 3 / speeds[node]
        assert submit(ledger, lease, draw(lease, sample), now) is None
        made[node] += 3
        while (group := ledger.hand_over("s")) is not None:
            ledger.taken(group.id, 0.0)
    return made, now


@pytest.mark.parametrize("ratio", [2, 8])
def test_work_follows_measured_speed(ratio):
    ledger = ledger_at(groups=0, busy_window_s=1.0)
    speeds = {ALICE: 100.0 * ratio, BOB: 100.0}
    work_off(ledger, speeds, 20)
    assert ledger.nodes[ALICE].rate.value == pytest.approx(speeds[ALICE], rel=0.05)
    assert ledger.nodes[BOB].rate.value == pytest.approx(100.0, rel=0.05)
    made, seconds = work_off(ledger, speeds, 60)
    total = sum(made.values())
    assert made[ALICE] / made[BOB] == pytest.approx(ratio, rel=0.1)
    assert total / seconds >= 0.95 * sum(speeds.values())


def test_an_exaggerated_claim_gains_little():
    ledger = ledger_at(groups=0, busy_window_s=1.0)
    work_off(ledger, {ALICE: 100.0}, 5)
    for i in range(8):
        ledger.offer(group_id(100 + i), "s", PROMPT, 8, SAMPLING)
    ledger.request_work(ALICE, ask(0), 500.0)
    leases = ledger.request_work(BOB, ask(64, rate=1e9), 500.0)
    assert sum(len(lease.samples) for lease in leases) == 32, "like a node as fast as the fastest known one"


def test_deadlines_come_from_the_nodes_own_rate():
    ledger = ledger_at(groups=40, n=8, min_deadline_s=1.0, max_deadline_s=1000.0, deadline_slack=3.0)
    lease = one_lease(ledger, capacity=8)
    assert lease.duration_s == 1000.0, "nothing known"
    for sample in range(8):
        submit(ledger, lease, draw(lease, sample), 2.4)
    lease = one_lease(ledger, capacity=8, now=2.4)
    assert lease.duration_s == pytest.approx(3 * 8 * 4 / 10.0)  # 8 samples of up to 4 tokens at 24 tokens / 2.4 s


def test_facts_say_why_samples_were_requeued():
    ledger = ledger_at(n=2)
    lease = one_lease(ledger)
    ledger.take_facts()
    ledger.member_lost(ALICE, 1.0)
    assert ledger.take_facts() == [Requeued(lease.id, group_id(0), (0, 1), str(Reason.NOT_A_MEMBER))]


def test_memory_of_verdicts_is_bounded():
    ledger = ledger_at(groups=1, n=64, remembered=8)
    lease = one_lease(ledger, capacity=64)
    for sample in range(64):
        rollout = draw(lease, sample, token_ids=(8 + sample, 2))
        assert ledger.submit(ALICE, rollout, sealed(lease, rollout), 1.0) is None
    assert len(ledger.acceptance) == 8
    assert KEY_OF[ALICE].public == ALICE


def test_tokens_are_packed_as_given():
    assert pack_tokens([0, 2**32 - 1]) == b"\0\0\0\0\xff\xff\xff\xff"
    for bad in ([-1], [2**32], ["x"], [0] * 65537):
        with pytest.raises(ValueError, match="token"):
            pack_tokens(bad)
