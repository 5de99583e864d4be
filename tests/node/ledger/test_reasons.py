"""Causes each reason for which the ledger refuses something, and checks what becomes of the work. A new reason without
a case here fails."""

from collections.abc import Callable

import pytest
from ledger_kit import (
    ALICE,
    BOB,
    CAROL,
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
)  # fmt: skip
from msgspec.structs import replace

from node.engines.base import OPTIONS, RewardAsked, SamplingParams
from node.ledger.facts import Requeued
from node.ledger.messages import Reason, RewardAnswer, RewardClaim, SignedRollout, VersionSpan, encode, work_hash
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService

Case = Callable[[], tuple[Ledger, object]]
"""Returns the ledger, and the answer or verdict."""


def leased(node=ALICE, now=0.0, n=2, **settings):
    ledger = ledger_at(n=n, **settings)
    (lease,) = ledger.request_work(node, ask(n), now)
    return ledger, lease


def refused(**changes) -> Case:
    """A result that differs from an honest one only in these fields."""

    def case():
        ledger, lease = leased()
        return ledger, submit(ledger, lease, replace(draw(lease, 0), **changes), 1.0)

    return case


def ended(how: Callable[[Ledger, object], object], **settings) -> Case:
    """A result for a lease to which `how` was done first."""

    def case():
        ledger, lease = leased(**settings)
        how(ledger, lease)
        return ledger, submit(ledger, lease, draw(lease, 0), 50.0)

    return case


def foreign():
    ledger, lease = leased()
    return ledger, ledger.submit(BOB, draw(lease, 0), sealed(lease, draw(lease, 0)), 1.0)


def repeated_sample():
    ledger, lease = leased()
    assert submit(ledger, lease, draw(lease, 0), 1.0) is None
    return ledger, submit(ledger, lease, draw(lease, 0, token_ids=(9, 2)), 1.0)


def copied():
    ledger = ledger_at(groups=2, n=1)
    for lease in ledger.request_work(ALICE, ask(2), 0.0):
        reason = submit(ledger, lease, draw(lease, 0, logprobs=b"\0\0\x40\xc1" * 3), 1.0)
    return ledger, reason


def too_fast():
    ledger = ledger_at(groups=0)
    sampling = SamplingParams(max_tokens=100)
    ledger.offer(group_id(0), "s", PROMPT, 1, sampling)
    (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
    work = work_hash(lease.group, 0, PROMPT, sampling)
    rollout = draw(lease, 0, token_ids=tuple(range(100)), finish_reason="length", work=work)
    return ledger, submit(ledger, lease, rollout, 0.001)


def forged():
    """Refused by the service, before the ledger sees it."""
    ledger, lease = leased()
    body = bytearray(sealed(lease, draw(lease, 0)))
    body[0] ^= 1
    service = LedgerService(ledger, None, None, clock=lambda: 1.0)  # type: ignore[arg-type]
    service.hear(ALICE, encode(SignedRollout(bytes(body))))
    (reason,) = ledger.nodes[ALICE].refused
    return ledger, reason


def late():
    ledger = ledger_at(groups=4, version=1)
    for version, now in ((2, 100.0), (3, 200.0)):
        ledger.advance(head(version), now)
    ledger.nodes[ALICE].rate.observe(4, 100.0)
    return ledger, ledger.request_work(ALICE, ask(4, version=2), 299.0)


def convicted():
    ledger, lease = leased()
    assert submit(ledger, lease, draw(lease, 0), 1.0) is None
    assert submit(ledger, lease, draw(lease, 1, token_ids=(9, 2)), 1.0) is None
    group = ledger.hand_over("s")
    assert group is not None
    assert not ledger.quarantine.accuse(group.id, 7, "no such sample", 2.0)
    ledger.take_facts()
    assert ledger.quarantine.accuse(group.id, 1, "off by 4 nats a token", 2.0)
    assert ledger.nodes[ALICE].reputation.penalty.until is None
    assert group.free == {0, 1}, "neither sample counts, and the group is no longer handed over"
    whys = {fact.why for fact in ledger.take_facts() if hasattr(fact, "sample")}
    return ledger, Reason(whys.pop())


def rewarded(*others: float) -> Case:
    """A sample whose author and `others` compute different rewards."""

    def case():
        ledger = ledger_at(groups=0)
        for node in (ALICE, BOB, CAROL)[: 1 + len(others)]:
            ledger.nodes[node].abilities = frozenset({OPTIONS, "reward:r@" + "1" * 16})
        ledger.quarantine.nodes_changed()
        ledger.tick(0.0)
        sampling = SAMPLING.with_options(reward=RewardAsked("r"))
        ledger.offer(group_id(0), "s", PROMPT, 1, sampling)
        (lease,) = ledger.request_work(ALICE, ask(1), 0.0)
        work = work_hash(lease.group, 0, PROMPT, sampling)
        assert submit(ledger, lease, draw(lease, 0, work=work, reward=RewardClaim(0.5)), 1.0) is None
        ledger.take_facts()
        for value in others:
            ((node, check),) = ledger.quarantine.rewards.due(2.0)
            ledger.quarantine.rewards.answer(node, RewardAnswer(check.id, value), 2.0)
        assert ledger.quarantine.rewards.due(2.0) == []
        (fact,) = ledger.take_facts()
        return ledger, Reason(fact.why)

    return case


def impossible():
    ledger, lease = leased()
    ledger.refuse_work(ALICE, lease.id, lease.token, 1.0)
    assert ledger.request_work(ALICE, ask(4), 2.0) is Reason.NO_WORK, "others may try"
    return ledger, submit(ledger, lease, draw(lease, 0), 3.0)


def spans(version, of=None):
    return (VersionSpan(0, version, of or root(0, version), 3),)


CASES: dict[Reason, Case] = {
    Reason.UNKNOWN_LEASE: refused(lease=77),
    Reason.EXPIRED: ended(lambda ledger, lease: ledger.tick(40.0), max_deadline_s=30.0),
    Reason.FENCED: refused(token=77),
    Reason.WRONG_NODE: foreign,
    Reason.NOT_A_MEMBER: ended(lambda ledger, lease: ledger.member_lost(ALICE, 1.0)),
    Reason.DUPLICATE: repeated_sample,
    Reason.WRONG_WORK: refused(work=bytes(32)),
    Reason.MALFORMED: refused(token_ids=b"\1\0\0"),
    Reason.TOO_OLD: refused(spans=spans(1)),
    Reason.TOO_NEW: refused(spans=spans(4)),
    Reason.WRONG_ROOT: refused(spans=spans(3, bytes(32))),
    Reason.BAD_SIGNATURE: forged,
    Reason.WITHDRAWN: ended(lambda ledger, lease: ledger.drop(lease.group)),
    Reason.IMPOSSIBLE: impossible,
    Reason.GIVEN_BACK: ended(lambda ledger, lease: ledger.give_back(ALICE, [lease.id], 1.0)),
    Reason.COPIED: copied,
    Reason.TOO_FAST: too_fast,
    Reason.QUARANTINED: ended(lambda ledger, lease: ledger.quarantine.quarantine(ALICE, "for a test", 600.0, 1.0)),
    Reason.LIED: convicted,
    Reason.WRONG_REWARD: rewarded(1.0, 1.0),
    Reason.DISPUTED: rewarded(1.0),
    Reason.NO_WORK: lambda: (ledger := ledger_at(groups=0), ledger.request_work(ALICE, ask(4), 0.0)),
    Reason.LATE: late,
}


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.name.lower())
def test_each_reason(reason: Reason):
    ledger, outcome = CASES[reason]()
    assert outcome is reason
    check_places(ledger)
    if reason in (Reason.MALFORMED, Reason.TOO_OLD, Reason.TOO_NEW, Reason.WRONG_ROOT, Reason.WRONG_WORK):
        requeued = [fact for fact in ledger.take_facts() if isinstance(fact, Requeued)]
        assert [(fact.samples, fact.why) for fact in requeued] == [((0,), str(reason))]
        assert ledger.nodes[ALICE].refused == {reason: 1}, "counted"
    free = {(group.id, sample) for group in ledger.groups.values() for sample in group.free | set(group.leased)}
    others = ledger.request_work(BOB, ask(64), 700.0)  # all leases have expired by then
    assert {(x.group, s) for x in (others if isinstance(others, list) else []) for s in x.samples} == free
