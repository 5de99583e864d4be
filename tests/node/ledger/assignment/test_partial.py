"""Partial groups, priorities and lags from what was trained: the ledger's rules, with the time as an argument."""

from pathlib import Path

import pytest
import trio
import trio.testing
from ledger_kit import ALICE, PROMPT, SAMPLING, ask, draw, group_id, head, ledger_at, root, sealed

from node.ledger.binding import Binding
from node.ledger.book import Book
from node.ledger.messages import Reason, VersionSpan
from node.ledger.rules import Ledger
from node.ledger.service import LedgerService, Turn
from node.ledger.settings import Settings
from node.ledger.state import LiveLease
from node.ledger.terms import Terms

PARTIAL = Terms(partial_s=10.0, least=2)


def ledger_with(terms: Terms, n: int = 4, version: int = 3) -> Ledger:
    ledger = ledger_at(version, groups=0)
    ledger.offer(group_id(0), "s", PROMPT, n, SAMPLING, terms=terms, now=100.0)
    return ledger


def lease(ledger: Ledger, node: bytes, now: float, capacity: int = 8, version: int = 3) -> list[LiveLease]:
    found = ledger.request_work(node, ask(capacity, version), now)
    return found if isinstance(found, list) else []


def finish(ledger: Ledger, one: LiveLease, sample: int, now: float, version: int = 3) -> Reason | None:
    rollout = draw(one, sample, version, token_ids=(8, 9 + sample, 2))
    return ledger.submit(one.node, rollout, sealed(one, rollout), now)


def test_a_group_is_cut_when_its_time_is_over_and_its_leases_are_void() -> None:
    ledger = ledger_with(PARTIAL)
    (one,) = lease(ledger, ALICE, 100.0)
    for sample in (0, 2):
        assert finish(ledger, one, sample, 101.0) is None
    assert ledger.partial.next_deadline() == 110.0
    assert ledger.next_deadline() <= 110.0
    assert ledger.partial.cut_due(109.9) == []
    assert ledger.partial.cut_due(110.0) == [one]
    group = ledger.groups[group_id(0)]
    assert (group.complete, group.size, sorted(group.done), group.dropped) == (True, 2, [0, 2], {1, 3})
    assert ledger.hand_over("s") is group
    assert ledger.nodes[ALICE].outstanding == 0
    assert ledger.is_void(ALICE, one.id)
    assert finish(ledger, one, 1, 110.5) is Reason.WITHDRAWN, "a result that was on its way"
    assert (ledger.pool.samples(), ledger.pool.wanted) == (0, 0)
    ledger.taken(group.id, 111.0)
    assert ledger.partial.cut_due(200.0) == []
    assert ledger.pool.held("s") == 0


def test_a_group_with_too_few_samples_waits_for_them() -> None:
    ledger = ledger_with(PARTIAL)
    (one,) = lease(ledger, ALICE, 100.0)
    assert finish(ledger, one, 3, 101.0) is None
    assert ledger.partial.cut_due(110.0) == []
    assert finish(ledger, one, 1, 130.0) is None
    assert [each.id for each in ledger.partial.cut_due(130.0)] == [one.id]
    assert ledger.groups[group_id(0)].complete


def test_a_complete_group_and_one_without_terms_are_never_cut() -> None:
    ledger = ledger_with(PARTIAL)
    ledger.offer(group_id(1), "s", PROMPT, 1, SAMPLING, now=100.0)
    for one in lease(ledger, ALICE, 100.0):
        if one.group == group_id(0):
            for sample in range(4):
                finish(ledger, one, sample, 101.0)
    assert ledger.partial.cut_due(1000.0) == []
    assert (ledger.groups[group_id(0)].dropped, ledger.groups[group_id(1)].complete) == (set(), False)


def test_what_is_too_old_in_a_cut_group_is_generated_again() -> None:
    ledger = ledger_with(PARTIAL)
    (one,) = lease(ledger, ALICE, 100.0)
    for sample in (0, 2):
        finish(ledger, one, sample, 101.0)
    ledger.partial.cut_due(110.0)
    ledger.advance(head(4))
    ledger.advance(head(5))
    group = ledger.groups[group_id(0)]
    assert (group.free, group.dropped, group.complete) == ({0, 2}, {1, 3}, False)
    (again,) = lease(ledger, ALICE, 120.0, version=5)
    assert again.samples == (0, 2)
    assert finish(ledger, again, 0, 121.0, version=5) is None
    assert ledger.partial.cut_due(121.0) == [], "it needs two"
    assert finish(ledger, again, 2, 122.0, version=5) is None
    assert group.complete
    assert sorted(group.done) == [0, 2]


def test_a_cut_survives_a_restart(tmp_path: Path) -> None:
    book = Book(tmp_path / "book")
    ledger = ledger_with(PARTIAL)
    ledger.offer(group_id(1), "s", PROMPT, 2, SAMPLING, terms=Terms(partial_s=10.0, priority=3), now=100.0)
    (one, _) = lease(ledger, ALICE, 100.0)
    for sample in (0, 2):
        finish(ledger, one, sample, 101.0)
    ledger.partial.cut_due(110.0)
    book.write(ledger.take_facts())
    kept = book.restore(Settings(), head(3), 5000.0)
    group = kept.groups[group_id(0)]
    assert (group.terms, group.dropped, sorted(group.done), group.free) == (PARTIAL, {1, 3}, [0, 2], set())
    assert group.complete
    other = kept.groups[group_id(1)]
    assert other.terms == Terms(partial_s=10.0, priority=3)
    assert kept.partial.next_deadline() == 5010.0, "its time runs anew"
    kept.drop(group_id(0))
    book.write(kept.take_facts())
    assert set(book.restore(Settings(), head(3), 0.0).groups) == {group_id(1)}
    book.close()


def test_work_of_a_higher_priority_comes_first() -> None:
    ledger = ledger_at(3, groups=0)
    for i, (session, priority) in enumerate([("a", 0), ("b", 5), ("c", -5), ("b", 5)]):
        ledger.offer(group_id(i), session, PROMPT, 1, SAMPLING, terms=Terms(priority=priority))
    order: list[bytes] = []
    for now in range(4):
        found = ledger.request_work(ALICE, ask(1, holding=tuple(ledger.leases)), float(now))
        assert isinstance(found, list)
        order += [one.group for one in found]
    assert order == [group_id(i) for i in (1, 3, 0, 2)]


def test_lags_are_counted_from_what_was_trained_only_where_that_is_asked_for() -> None:
    ledger = ledger_at(3, groups=0)
    for i, terms in enumerate((Terms(), Terms(from_trained=True))):
        ledger.offer(group_id(i), f"s{i}", PROMPT, 1, SAMPLING, max_lag=1, terms=terms)
    for one in lease(ledger, ALICE, 0.0):
        span = (VersionSpan(0, 2, root(0, 2), 3),)
        rollout = draw(one, 0, spans=span, token_ids=(8, 9 + one.id, 2))
        assert ledger.submit(ALICE, rollout, sealed(one, rollout), 1.0) is None
    ledger.note_trained((0, 4))
    assert [ledger.groups[group_id(i)].complete for i in (0, 1)] == [True, False], "version 2 is two behind the trainer"
    (again,) = lease(ledger, ALICE, 2.0)
    assert (again.group, again.minimum) == (group_id(1), (0, 3))
    ledger.note_trained((0, 5))
    assert finish(ledger, again, 0, 3.0) is Reason.TOO_OLD
    assert ledger.request_work(ALICE, ask(8), 4.0) is Reason.TOO_OLD, "it waits for a version that may count"
    ledger.advance(head(4))
    _, last = lease(ledger, ALICE, 5.0, version=4)
    assert finish(ledger, last, 0, 6.0, version=4) is None
    ledger.advance(head(5))
    assert ledger.head.trained == ()
    assert ledger.groups[group_id(1)].complete


def test_evaluations_and_training_do_not_take_each_others_room() -> None:
    ledger, evaluates = ledger_at(3, groups=0), Terms(evaluates=True)
    assert lease(ledger, ALICE, 0.0) == []
    assert (ledger.room("t", 1), ledger.room("e", 1, terms=evaluates)) == (16, 16)
    for i in range(16):
        ledger.offer(group_id(i), "t", PROMPT, 1, SAMPLING)
    assert (ledger.room("t", 1), ledger.room("e", 1, terms=evaluates)) == (0, 16)
    ledger.drop_session("t")
    for i in range(12):
        ledger.offer(group_id(i), "e", PROMPT, 1, SAMPLING, terms=evaluates)
    assert (ledger.room("t", 1), ledger.room("e", 1, terms=evaluates)) == (16, 4)
    for one in lease(ledger, ALICE, 1.0):
        finish(ledger, one, 0, 2.0)
        ledger.taken(one.group, 3.0)
    ledger.drop_session("e")
    assert (ledger.room("t", 1), ledger.pool.samples()) == (16, 0)


@pytest.mark.parametrize("said", [(0, 2), (1, 9)])
def test_a_version_that_is_not_newer_or_of_another_epoch_changes_nothing(said: tuple[int, int]) -> None:
    ledger = ledger_with(Terms(from_trained=True))
    ledger.note_trained(said)
    assert ledger.head == head(3)


def test_a_ledger_without_anything_to_do_sleeps(tmp_path: Path) -> None:
    """It looks for groups to cut at each turn, and that alone must not cause the next turn."""
    turns = 0

    async def main() -> None:
        nonlocal turns
        book = Book(tmp_path / "book")
        service = LedgerService(book.restore(Settings(), head(3), trio.current_time()), book, no_send)
        begin_turn = service.begin_turn

        def counted() -> Turn:
            nonlocal turns
            turns += 1
            return begin_turn()

        service.begin_turn = counted  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            session = service.open("s", Binding(1, SAMPLING), terms=PARTIAL)
            service.offer(session, group_id(0), PROMPT)
            await trio.sleep(30.0)
            nursery.cancel_scope.cancel()
        book.close()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.01))
    assert turns < 10


async def no_send(node: bytes, body: bytes) -> None:
    await trio.lowlevel.checkpoint()
