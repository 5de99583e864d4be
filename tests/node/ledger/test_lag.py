"""How old a token may be when the trainer gets it."""

import trio
from ledger_kit import (
    ALICE,
    KEY_OF,
    PROMPT,
    SAMPLING,
    ask,
    check_places,
    draw,
    group_id,
    head,
    ledger_at,
    sealed,
    submit,
)

from node.ledger.binding import Binding
from node.ledger.book import Book
from node.ledger.messages import Reason, SignedRollout, decode, encode
from node.ledger.service import LedgerService
from node.ledger.settings import Settings


def complete(ledger, count=1, version=3, now=1.0):
    """Complete `count` groups of one sample each, sampled at `version`."""
    for lease in ledger.request_work(ALICE, ask(count, version=version), now):
        assert submit(ledger, lease, draw(lease, 0, version), now + 1.0) is None


def test_without_lag_the_version_being_published_counts():
    ledger = ledger_at(3, groups=2, n=1, max_lag=0)
    complete(ledger, 2)
    assert ledger.hand_over("s") is not None
    ledger.begin_version((0, 4))
    assert ledger.hand_over("s") is None, "the trainer's weights have changed"
    assert ledger.request_work(ALICE, ask(1), 2.0) is Reason.TOO_OLD, "and no tokens are generated in vain"
    ledger.abandon_version()
    complete(ledger, 1, now=3.0)
    assert ledger.hand_over("s") is not None, "the trainer abandoned that version, so its weights are the head's again"
    check_places(ledger)


def test_with_a_lag_of_one_the_newest_sealed_version_counts():
    ledger = ledger_at(3, groups=1, n=1)
    complete(ledger, 1, version=2)
    ledger.begin_version((0, 4))
    group = ledger.hand_over("s")
    assert group is not None
    assert not ledger.discard_stale(group.id, (0, 3))
    assert group.handed_over
    ledger.advance(head(4))
    assert group.done, "the group was handed over, so only the ledger's caller may discard it"
    assert ledger.discard_stale(group.id, (0, 4))
    assert group.free == {0}
    assert not group.handed_over
    check_places(ledger)
    assert not ledger.discard_stale(group_id(9), (0, 4)), "an unknown group"
    complete(ledger, 1, version=3, now=6.0)
    assert ledger.hand_over("s") is group
    ledger.taken(group.id, 0.0)
    assert not ledger.groups


def test_a_rollback_makes_all_of_the_old_epoch_too_old():
    ledger = ledger_at(3, groups=1, n=1)
    complete(ledger, 1)
    group = ledger.hand_over("s")
    assert ledger.discard_stale(group.id, (1, 2))
    ledger.begin_version((0, 3))
    assert ledger.head.coming is None, "a version that is sealed already is not expected"


async def test_groups_that_were_not_fetched_are_discarded_when_too_old(tmp_path, autojump_clock):
    sent = []

    async def send(node, body):
        sent.append(decode(body))

    async def inline(function, *args):
        return function(*args)

    book = Book(tmp_path / "ledger.sqlite")
    ledger = book.restore(Settings(), head(3), trio.current_time())
    async with trio.open_nursery() as nursery:
        service = LedgerService(ledger, book, send, off_loop=inline)
        await nursery.start(service.run)
        service.member_up(ALICE)
        session = service.open("s", Binding(1, SAMPLING, max_lag=0))
        service.offer(session, group_id(1), PROMPT)
        await trio.sleep(0.1)

        async def work(version):
            """Request work at `version`, and deliver the rollout."""
            service.hear(ALICE, encode(ask(1, version=version)))
            await trio.sleep(0.1)
            lease = next(iter(ledger.leases.values()))
            rollout = draw(lease, 0, version)
            service.hear(ALICE, encode(SignedRollout(sealed(lease, rollout))))
            await trio.sleep(0.1)

        await work(3)
        assert [group.done[0].oldest for group in session.groups] == [(0, 3)]
        service.begun((0, 4))
        assert not session.groups
        service.sealed(head(4))
        await work(4)
        assert [group.done[0].oldest for group in session.groups] == [(0, 4)]
        nursery.cancel_scope.cancel()
    book.close()


def test_an_ended_lease_is_void_unless_all_of_it_was_delivered():
    ledger = ledger_at(3, groups=2, n=1, max_deadline_s=30.0)
    done, open_ = ledger.request_work(ALICE, ask(2), 0.0)
    assert submit(ledger, done, draw(done, 0), 1.0) is None
    assert not ledger.is_void(ALICE, done.id), "its verdict may still be on its way"
    assert not ledger.is_void(ALICE, open_.id)
    assert ledger.is_void(next(key for key in KEY_OF if key != ALICE), open_.id)
    ledger.tick(40.0)
    assert ledger.is_void(ALICE, open_.id)
