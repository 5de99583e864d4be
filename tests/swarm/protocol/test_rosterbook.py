"""The roster as a peer holds it: changes in and out of order, gaps, and which peer it asks."""

import random

from planner_kit import plan
from protocol_kit import AUTHORITY as KEY
from protocol_kit import SWARM, TUNING, key_of, member

from swarm.protocol.core.outbox import Outbox
from swarm.protocol.membership.roster import Member, Roster, difference, seal_change, whole
from swarm.protocol.membership.rosterbook import LOG_CHANGES, RosterBook
from swarm.protocol.membership.session import Sessions


def members(count: int) -> list[Member]:
    return [member(s, peer=s.to_bytes(32, "little")) for s in range(count)]


def story(length: int) -> tuple[list[Roster], list[bytes]]:
    """A swarm that grows by one member at a time: its rosters, and the sealed change that led to each."""
    rosters: list[Roster] = []
    changes: list[bytes] = []
    for serial in range(1, length + 1):
        who = members(30 + serial)
        roster = Roster(SWARM, 1, serial, ("/sim/authority",), tuple(who), plan(who[:30], 1))
        # Later members attach to the first, which keeps changes small.
        rows = tuple(row + (0,) * serial for row in roster.parents)
        roster = Roster(SWARM, 1, serial, ("/sim/authority",), tuple(who), rows)
        changes.append(seal_change(difference(rosters[-1] if rosters else None, roster), KEY))
        rosters.append(roster)
    return rosters, changes


def book_at(rosters: list[Roster], changes: list[bytes], serial: int) -> RosterBook:
    book = RosterBook(SWARM, TUNING)
    assert book.take_whole(whole(rosters[serial - 1], changes[serial - 1]))
    return book


def test_changes_in_order() -> None:
    rosters, changes = story(5)
    book = book_at(rosters, changes, 1)
    for roster, change in zip(rosters[1:], changes[1:], strict=True):
        assert book.take_step(change, 0.0)
        assert book.roster == roster
        assert not book.take_step(change, 0.0)


def test_changes_that_overtake_one_another() -> None:
    rosters, changes = story(5)
    book = book_at(rosters, changes, 1)
    assert [book.take_step(changes[i], 0.0) for i in (3, 2, 4)] == [False] * 3
    assert book.take_step(changes[1], 0.0)
    assert book.roster == rosters[4]


def test_it_sends_the_changes_from_another_roster_to_its_own() -> None:
    rosters, changes = story(6)
    book = book_at(rosters, changes, 2)
    for change in changes[2:]:
        book.take_step(change, 0.0)
    assert book.since(rosters[3].stamp) == changes[4:]
    assert book.since(rosters[5].stamp) == []
    assert book.since(rosters[0].stamp) is None
    other = RosterBook(SWARM, TUNING)
    assert other.take_whole(book.whole())
    assert other.roster == rosters[5]


def test_what_is_kept_for_others_is_bounded() -> None:
    rosters, changes = story(LOG_CHANGES + 20)
    book = book_at(rosters, changes, 1)
    for change in changes[1:]:
        book.take_step(change, 0.0)
    assert book.since(rosters[10].stamp) is None
    assert len(book.since(rosters[25].stamp) or []) == LOG_CHANGES + 20 - 26


def ready(sessions: Sessions, peer: bytes, stamp: int) -> None:
    session = sessions.up(peer, None, 0.0)
    session.ready, session.roster = True, stamp


def ask(book: RosterBook, sessions: Sessions, now: float, *, root_child: bool = False) -> bytes | None:
    return book.whom_to_ask(sessions, SWARM, now, admitted_at=0.0, root_child=root_child)


def test_a_gap_is_asked_for_after_a_while() -> None:
    rosters, changes = story(3)
    book, sessions = book_at(rosters, changes, 1), Sessions(TUNING, random.Random(1), Outbox())
    ready(sessions, key_of(1).public, rosters[2].stamp)
    assert ask(book, sessions, 0.0) is None
    book.hear_of(rosters[2].stamp, 0.0)
    assert ask(book, sessions, 0.0) is None  # the change may be on its way
    assert ask(book, sessions, TUNING.heartbeat_s) == key_of(1).public
    assert ask(book, sessions, TUNING.heartbeat_s + 0.1) is None


def test_the_authority_is_asked_last_unless_it_is_our_parent() -> None:
    sessions = Sessions(TUNING, random.Random(1), Outbox())
    ready(sessions, SWARM, 9)
    nothing = RosterBook(SWARM, TUNING)
    assert ask(nothing, sessions, 0.1) is None
    assert ask(nothing, sessions, 0.1, root_child=True) == SWARM
    late = RosterBook(SWARM, TUNING)
    assert ask(late, sessions, TUNING.pull_deadline_s + 0.1) == SWARM
    ready(sessions, key_of(1).public, 9)
    assert ask(RosterBook(SWARM, TUNING), sessions, 9.0) == key_of(1).public
