"""Relief: what a parent owes is got from neighbours, and from the parent after all where they fail."""

from protocol_kit import TUNING, book_with, header, key_of, version

from swarm.protocol.chunks import Chunk, Chunks
from swarm.protocol.events import Effect, Send, SetTimer
from swarm.protocol.relief import Relief
from swarm.protocol.wire import Skip, WantChunk

PARENT, ANNA, BEN = (key_of(name).public for name in ("parent", "anna", "ben"))
LATE = TUNING.relief_after_s


def owing(chunks: int, sources: tuple[bytes, ...] = (ANNA, BEN)) -> tuple[Relief, Chunks, list[Chunk]]:
    """The headers of so many chunks of 384 KiB have come at 0.0, and no piece."""
    book, made = book_with([header(1, seq, pieces=6, piece_bytes=64 << 10) for seq in range(chunks)], held=False)
    relief = Relief(TUNING, lambda stripe, seq: list(sources), lambda stripe: PARENT)
    effects: list[Effect] = []
    for chunk in made:
        relief.owes(chunk, 0.0, effects)
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [LATE]
    return relief, book, made


def due(relief: Relief, now: float) -> list[tuple[bytes, WantChunk | Skip]]:
    effects: list[Effect] = []
    relief.due(now, effects)
    return said(effects)


def said(effects: list[Effect]) -> list[tuple[bytes, WantChunk | Skip]]:
    return [(e.peer, e.message) for e in effects if isinstance(e, Send)]


def piece(relief: Relief, book: Chunks, chunk: Chunk, index: int, peer: bytes, now: float) -> list[Effect]:
    effects: list[Effect] = []
    book.piece(chunk.key, index, now)
    relief.arrived(chunk, peer, now, effects)
    return effects


def test_a_parent_that_owes_little_is_left_alone() -> None:
    relief, _, _ = owing(1)
    assert due(relief, LATE) == []


def test_what_is_young_is_not_asked_of_others() -> None:
    relief, _, _ = owing(4)
    assert due(relief, LATE / 2) == []


def test_what_comes_late_is_asked_of_a_neighbour_who_has_nothing_better_to_do() -> None:
    relief, _, made = owing(3)
    asked = due(relief, LATE)
    assert [(peer, want.seq, want.idle) for peer, want in asked] == [(ANNA, 0, True), (ANNA, 1, True)]
    assert made[0].key in relief
    assert made[2].key not in relief


def test_the_parent_is_told_to_skip_it_when_it_begins_to_come_and_not_before() -> None:
    relief, book, made = owing(2)
    due(relief, LATE)
    assert said(piece(relief, book, made[0], 0, ANNA, LATE)) == [(PARENT, Skip(0, *made[0].key))]
    assert said(piece(relief, book, made[0], 1, ANNA, LATE)) == []
    for index in (2, 3, 4, 5):
        assert said(piece(relief, book, made[0], index, ANNA, LATE)) == []
    assert made[0].key not in relief


def test_what_the_parent_brings_after_all_is_not_skipped() -> None:
    relief, book, made = owing(2)
    due(relief, LATE)
    for index in range(6):
        assert said(piece(relief, book, made[0], index, PARENT, LATE)) == []
    assert made[0].key not in relief


def test_who_lacks_it_makes_way_at_once_and_is_left_in_peace_for_a_while() -> None:
    relief, _, made = owing(2)
    due(relief, LATE)
    effects: list[Effect] = []
    relief.lacks(BEN, made[0].key, LATE, effects)  # not whom we asked
    assert effects == []
    relief.lacks(ANNA, made[0].key, LATE, effects)
    assert said(effects) == []  # BEN is busy, as it said itself
    assert made[0].key not in relief
    assert due(relief, LATE + TUNING.relief_pause_s / 2) == []
    assert [peer for peer, _ in due(relief, LATE + 2 * TUNING.relief_pause_s)] == [ANNA]


def test_what_a_neighbour_began_and_does_not_finish_is_asked_of_the_next_and_of_the_parent_in_the_end() -> None:
    relief, book, made = owing(2)
    due(relief, LATE)
    piece(relief, book, made[0], 0, ANNA, LATE)
    now = LATE + TUNING.relief_deadline_s
    ((peer, want),) = due(relief, now)
    assert (peer, want.idle, want.pieces) == (BEN, True, b"\x3e")
    relief.lost(BEN)
    (peer, want), *_ = due(relief, now)
    assert (peer, want.idle, want.pieces) == (PARENT, False, b"\x3e")
    assert made[0].key not in relief


def test_a_version_that_is_settled_is_asked_for_no_more() -> None:
    relief, _, made = owing(4)
    due(relief, LATE)
    relief.forget(version(1))
    assert all(chunk.key not in relief for chunk in made)
    assert due(relief, 2 * LATE) == []


def test_nobody_to_ask() -> None:
    relief, _, _ = owing(4, sources=(PARENT,))
    assert due(relief, LATE) == []
