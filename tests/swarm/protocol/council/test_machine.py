"""A machine of the council by itself: events in, effects out."""

import random

import pytest

from codec.errors import PeerError
from swarm.protocol.council.events import (
    AskedToHandOver,
    Ballot,
    CouncilEffect,
    CouncilHeard,
    Established,
    InstallSnapshot,
    Lead,
    Propose,
    Resign,
    SaveBallot,
    SendSnapshot,
    SendTo,
    SnapshotCame,
    StopLeading,
    StoreEntries,
    TakeOver,
    Tick,
    WakeAt,
)
from swarm.protocol.council.machine import CouncilMachine, Role
from swarm.protocol.council.messages import START, Ack, Append, AskVote, Entry, HandOver, Position, Release, Vote
from swarm.protocol.council.timing import LAN, TIMINGS

A, B, C = b"A", b"B", b"C"
LEASE_S, BEAT_S = LAN.lease_s, LAN.beat_s


FOUNDED = Position(0, 1)
"""Of the machine that founded the council."""


def machine(last: Position = FOUNDED, ballot: Ballot = Ballot(0, b""), now: float = 100.0) -> CouncilMachine:  # noqa: B008
    found = CouncilMachine(A, [A, B, C], LAN, random.Random(1), ballot, last, now=now)
    found.start(now)
    return found


def without_timer(effects: list[CouncilEffect]) -> list[CouncilEffect]:
    assert isinstance(effects[-1], WakeAt)
    return effects[:-1]


def hear(of: CouncilMachine, peer: bytes, message: object, now: float) -> list[CouncilEffect]:
    return without_timer(of.apply(CouncilHeard(peer, message), now))  # pyright: ignore[reportArgumentType]


def leader(now: float = 110.0, ballot: Ballot = Ballot(0, b"")) -> CouncilMachine:  # noqa: B008
    """A machine that was elected by B, and that leads since B has stored its first entry."""
    found = machine(ballot=ballot)
    term = ballot.term + 1
    found.apply(Tick(), now)
    hear(found, B, Vote(term, False, True), now)
    hear(found, B, Vote(term, True, True), now)
    assert hear(found, B, Ack(term, now, Position(term, 2), False), now) == [Lead(term), Established(2)]
    return found


def test_a_restarted_machine_elects_nobody_for_a_lease() -> None:
    found = machine()
    assert hear(found, B, AskVote(1, FOUNDED, True), 100.0 + LEASE_S - 0.01) == [SendTo(B, Vote(0, True, False))]
    granted = hear(found, B, AskVote(1, FOUNDED, True), 100.0 + LEASE_S)
    assert granted == [SaveBallot(Ballot(1, B)), SendTo(B, Vote(1, True, True))]


def test_an_election_stores_the_vote_and_then_the_first_entry() -> None:
    found = machine()
    asked = without_timer(found.apply(Tick(), 110.0))
    assert asked == [SendTo(B, AskVote(1, FOUNDED, False)), SendTo(C, AskVote(1, FOUNDED, False))]
    assert found.role is Role.ASKING
    assert found.ballot.term == 0
    asked = hear(found, C, Vote(1, False, True), 110.0)
    assert asked[0] == SaveBallot(Ballot(1, A))
    assert asked[1] == SendTo(B, AskVote(1, FOUNDED, True))
    began = hear(found, C, Vote(1, True, True), 110.0)
    first = Entry(1, 2, b"")
    assert began[0] == StoreEntries((first,))
    assert began[1:] == [SendTo(peer, Append(1, 110.0, FOUNDED, (first,))) for peer in (B, C)]
    assert not found.is_leading(110.0), "no majority has stored its first entry"


def test_a_vote_goes_to_one_machine_a_term_and_to_none_that_lacks_an_entry() -> None:
    found = machine(last=Position(3, 7), ballot=Ballot(3, b""))
    refused = [SendTo(B, Vote(3, True, False))]
    assert hear(found, B, AskVote(4, Position(3, 6), True), 100.0 + LEASE_S) == refused
    assert hear(found, B, AskVote(4, Position(2, 9), True), 100.0 + LEASE_S) == refused
    assert hear(found, B, AskVote(4, Position(3, 7), True), 100.0 + LEASE_S)[-1] == SendTo(B, Vote(4, True, True))
    assert hear(found, C, AskVote(4, Position(3, 9), True), 100.0 + LEASE_S) == [SendTo(C, Vote(4, True, False))]
    assert hear(found, B, AskVote(4, Position(3, 7), True), 100.0 + LEASE_S) == [SendTo(B, Vote(4, True, True))], (
        "asked again"
    )


def test_a_follower_stores_before_it_answers_and_promises_a_lease() -> None:
    found = machine(last=START)
    first = Entry(5, 1, b"x")
    effects = hear(found, B, Append(5, 3.0, START, (first,)), 101.0)
    assert effects == [
        SaveBallot(Ballot(5, b"")),
        StoreEntries((first,)),
        SendTo(B, Ack(5, 3.0, Position(5, 1), False)),
    ]
    assert hear(found, C, AskVote(6, Position(5, 1), True), 101.0 + LEASE_S - 0.01)[0] == SendTo(
        C, Vote(5, True, False)
    )
    assert not isinstance(hear(found, C, AskVote(6, Position(5, 1), True), 101.0 + LEASE_S)[0], SendTo)


def test_a_leader_of_an_older_term_is_told_so_and_stops() -> None:
    follower = machine(ballot=Ballot(9, b""))
    refused = hear(follower, B, Append(8, 1.0, START, ()), 101.0)
    assert refused == [SendTo(B, Ack(9, 0.0, FOUNDED, False))]
    found = leader()
    assert isinstance(hear(found, B, Ack(9, 0.0, START, False), 110.1)[0], StopLeading)
    assert not found.is_leading(110.1)


def test_the_lease_ends_when_nobody_answers() -> None:
    found = leader(now=110.0)
    assert found.is_leading(110.0 + LAN.leads_s - 0.01)
    assert not found.is_leading(110.0 + LAN.leads_s)
    stopped = without_timer(found.apply(Tick(), 110.0 + LAN.leads_s))
    assert isinstance(stopped[0], StopLeading)
    assert found.role is Role.FOLLOWER


@pytest.mark.parametrize("timing", TIMINGS.values())
def test_no_lease_outlives_the_promise_that_it_counts_on(timing) -> None:
    fast, slow = 1 + timing.drift, 1 - timing.drift
    assert timing.leads_s / slow < timing.lease_s / fast
    assert timing.leads_s > 2 * timing.beat_s, "one lost message does not end a lease"


def test_an_answer_renews_the_lease_as_of_the_sending() -> None:
    found = leader(now=110.0)
    hear(found, C, Ack(1, 111.0, Position(1, 2), False), 112.0)
    assert found.leads_until(112.0) == pytest.approx(111.0 + LAN.leads_s)
    hear(found, C, Ack(1, 500.0, Position(1, 2), False), 112.5)
    assert found.leads_until(112.5) == pytest.approx(112.5 + LAN.leads_s), "no answer is to a message of the future"


def test_an_entry_counts_when_a_majority_has_stored_it() -> None:
    found = leader()
    proposed = without_timer(found.apply(Propose(b"one"), 110.1))
    entry = Entry(1, 3, b"one")
    assert proposed[0] == StoreEntries((entry,))
    assert SendTo(B, Append(1, 110.1, Position(1, 2), (entry,))) in proposed
    assert not [effect for effect in proposed if isinstance(effect, Established)]
    assert hear(found, C, Ack(1, 110.1, Position(1, 3), False), 110.2) == [Established(3)]


def test_a_follower_that_lacks_a_message_says_so_and_gets_it_again() -> None:
    found = leader()
    found.apply(Propose(b"one"), 110.1)
    found.apply(Propose(b"two"), 110.2)
    again = hear(found, B, Ack(1, 110.2, Position(1, 2), True), 110.3)
    two = (Entry(1, 3, b"one"), Entry(1, 4, b"two"))
    assert again == [SendTo(B, Append(1, 110.3, Position(1, 2), two))]
    follower = machine(last=Position(1, 2), ballot=Ballot(1, b""))
    assert hear(follower, A, Append(1, 1.0, Position(1, 3), two[1:]), 101.0) == []  # of itself: not of the others
    gap = hear(follower, B, Append(1, 1.0, Position(1, 3), two[1:]), 101.0)
    assert gap == [SendTo(B, Ack(1, 1.0, Position(1, 2), True))]
    stored = hear(follower, B, Append(1, 2.0, Position(1, 2), two), 101.1)
    assert stored == [StoreEntries(two), SendTo(B, Ack(1, 2.0, Position(1, 4), False))]
    twice = hear(follower, B, Append(1, 2.0, Position(1, 2), two), 101.1)
    assert twice == [SendTo(B, Ack(1, 2.0, Position(1, 4), False))]


def test_a_log_that_is_not_the_leaders_is_replaced_by_a_snapshot() -> None:
    found = leader(ballot=Ballot(4, b""))
    effects = hear(found, C, Ack(5, 110.0, Position(3, 8), True), 110.1)
    assert effects == [SendSnapshot(C, 5)]
    assert hear(found, C, Ack(5, 110.1, Position(3, 8), True), 110.2) == [], "one at a time"
    follower = machine(last=Position(3, 8), ballot=Ballot(3, b""))
    hear(follower, B, Append(5, 1.0, Position(5, 1), ()), 101.0)
    came = without_timer(follower.apply(SnapshotCame(B, 5, Position(5, 1)), 101.5))
    assert came == [InstallSnapshot(B, Position(5, 1)), SendTo(B, Ack(5, 0.0, Position(5, 1), False))]
    assert follower.last == Position(5, 1)


def test_a_snapshot_that_is_older_than_the_log_or_of_an_older_leader_is_dropped() -> None:
    follower = machine(last=Position(5, 9), ballot=Ballot(5, b""))
    hear(follower, B, Append(5, 1.0, Position(5, 9), ()), 101.0)
    assert without_timer(follower.apply(SnapshotCame(B, 5, Position(5, 8)), 101.5)) == []
    assert without_timer(follower.apply(SnapshotCame(B, 4, Position(4, 99)), 101.5)) == []
    assert without_timer(follower.apply(SnapshotCame(C, 5, Position(5, 99)), 101.5)) == []


def test_a_handover_ends_the_promises_and_the_named_machine_campaigns_at_once() -> None:
    found = leader()
    assert hear(found, C, HandOver(1), 110.1) == [], "it does not have this leader's log yet"
    hear(found, C, Ack(1, 110.0, Position(1, 2), False), 110.2)
    assert hear(found, C, HandOver(1), 110.3) == [AskedToHandOver(C)]
    assert found.is_leading(110.3), "until its application has stopped"
    released = without_timer(found.apply(Resign(C), 110.4))
    assert released == [SendTo(B, Release(1, C)), SendTo(C, Release(1, C))]
    assert not found.is_leading(110.4)
    follower = machine(ballot=Ballot(1, b""))
    hear(follower, B, Append(1, 1.0, FOUNDED, ()), 105.0)
    asked = hear(follower, B, Release(1, A), 105.1)
    assert asked == [SendTo(B, AskVote(2, FOUNDED, False)), SendTo(C, AskVote(2, FOUNDED, False))]


def test_a_person_can_have_a_follower_ask_for_the_lead() -> None:
    follower = machine(ballot=Ballot(1, b""))
    hear(follower, B, Append(1, 1.0, FOUNDED, ()), 105.0)
    assert without_timer(follower.apply(TakeOver(), 105.1)) == []
    answered = hear(follower, B, Append(1, 1.2, FOUNDED, ()), 105.2)
    assert answered == [SendTo(B, Ack(1, 1.2, FOUNDED, False)), SendTo(B, HandOver(1))]
    asked = follower.apply(Tick(), 105.2 + LEASE_S + LAN.jitter_s)
    assert SendTo(B, AskVote(2, FOUNDED, False)) in asked, "and campaigns when the leader says no more"


def test_a_council_of_one_leads_by_itself() -> None:
    found = CouncilMachine(A, [A], LAN, random.Random(1), Ballot(0, b""), FOUNDED, now=0.0)
    effects = found.apply(Tick(), LEASE_S + LAN.jitter_s)
    assert [type(effect) for effect in effects] == [SaveBallot, StoreEntries, Lead, Established, WakeAt]
    assert found.is_leading(LEASE_S + LAN.jitter_s)
    assert Established(3) in found.apply(Propose(b"x"), 100.0)


def test_a_machine_without_a_state_leads_nothing() -> None:
    found = machine(last=START)
    for now in (110.0, 120.0, 200.0):
        assert without_timer(found.apply(Tick(), now)) == []
    assert without_timer(found.apply(TakeOver(), 300.0)) == []
    granted = hear(found, B, AskVote(1, FOUNDED, True), 300.0)
    assert granted[-1] == SendTo(B, Vote(1, True, True)), "it elects others"


def test_a_machine_that_could_not_act_as_the_leader_elects_others() -> None:
    found = machine()
    found.may_lead = False
    found.apply(TakeOver(), 109.0)
    assert without_timer(found.apply(Tick(), 110.0)) == []
    assert hear(found, B, AskVote(1, FOUNDED, True), 111.0)[-1] == SendTo(B, Vote(1, True, True))
    assert hear(found, B, Append(1, 1.0, FOUNDED, ()), 112.0) == [SendTo(B, Ack(1, 1.0, FOUNDED, False))]
    found.may_lead = True
    assert SendTo(B, HandOver(1)) in hear(found, B, Append(1, 2.0, FOUNDED, ()), 112.5)


def test_a_second_leader_of_one_term_is_a_broken_rule() -> None:
    with pytest.raises(PeerError):
        hear(leader(), B, Append(1, 1.0, START, ()), 110.1)


def test_a_council_lists_each_machine_once() -> None:
    for machines in ([B, C], [A, B, B]):
        with pytest.raises(ValueError, match="once"):
            CouncilMachine(A, machines, LAN, random.Random(1), Ballot(0, b""), START, now=0.0)
