"""Relief: what a parent owes is wished for, taken from whoever offers it, and from the parent where they fail."""

import pytest
from member_kit import a_forwarder
from protocol_kit import SWARM, TUNING, book_with, header, key_of, manifest, version

from codec import open_manifest
from swarm.protocol.core.events import Effect, Send, SetTimer, Timer
from swarm.protocol.core.wire import Skip, WantChunk, Wishes
from swarm.protocol.transfer.chunks import Chunk, Chunks
from swarm.protocol.transfer.load_shedding import PROMISES, WISHES_HOLD_S, Relief

PARENT, ANNA, BEN = (key_of(name).public for name in ("parent", "anna", "ben"))
LATE = TUNING.relief_after_s


def owing(chunks: int, neighbours: tuple[bytes, ...] = (ANNA, BEN)) -> tuple[Relief, Chunks, list[Chunk]]:
    """The headers of so many chunks of 384 KiB have come at 0.0, and no piece."""
    book, made = book_with([header(1, seq, pieces=6, piece_bytes=64 << 10) for seq in range(chunks)], held=False)
    relief = Relief(TUNING, lambda: list(neighbours), lambda stripe: PARENT, book.dealt)
    effects: list[Effect] = []
    for chunk in made:
        relief.owes(chunk, 0.0, effects)
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [LATE]
    return relief, book, made


def due(relief: Relief, now: float) -> list[tuple[bytes, object]]:
    effects: list[Effect] = []
    relief.due(now, effects)
    return said(effects)


def said(effects: list[Effect]) -> list[tuple[bytes, object]]:
    return [(e.peer, e.message) for e in effects if isinstance(e, Send)]


def offered(relief: Relief, peer: bytes, chunk: Chunk, now: float) -> list[tuple[bytes, object]]:
    effects: list[Effect] = []
    relief.offered(peer, chunk.key, now, effects)
    return said(effects)


def piece(relief: Relief, book: Chunks, chunk: Chunk, index: int, peer: bytes, now: float) -> None:
    book.piece(chunk.key, index, now)
    relief.arrived(chunk, peer, now)


def seal_all(book: Chunks, chunks: list[Chunk]) -> None:
    """The seal of a version of these chunks has come."""
    sealed = manifest(1, len(chunks))
    book.manifest(open_manifest(sealed, SWARM), sealed, 0.0, [])


def wishes(*seqs: int) -> Wishes:
    return Wishes(0, 1, 0, seqs)


def test_a_parent_that_owes_little_is_left_alone() -> None:
    relief, _, _ = owing(1)
    assert due(relief, LATE) == []


def test_it_says_what_a_parent_owes_as_of_its_last_look() -> None:
    relief, book, chunks = owing(5)
    assert relief.owed_bytes(0) == 0
    due(relief, LATE)
    assert relief.owed_bytes(0) == 5 * 6 * (64 << 10)
    offered(relief, ANNA, chunks[1], LATE)  # Anna brings it
    piece(relief, book, chunks[0], 0, PARENT, LATE)
    due(relief, 2 * LATE)
    assert relief.owed_bytes(0) == (4 * 6 - 1) * (64 << 10)
    relief.forget(version(1))
    due(relief, 3 * LATE)
    assert relief.owed_bytes(0) == 0
    assert relief.owed_bytes(1) == 0


def test_a_member_lets_its_credit_follow_from_that() -> None:
    member = a_forwarder()
    assert 0 in member.state.exchange.parents
    for seq in range(5):
        member.apply(header(1, seq, pieces=6, piece_bytes=64 << 10), 1.0)
    member.apply(Timer("relief"), 1.0 + LATE)
    assert member.state.exchange.owed(0) == 5 * 6 * (64 << 10)


def test_what_is_young_is_not_wished_for() -> None:
    relief, _, _ = owing(4)
    assert due(relief, LATE / 2) == []


def test_neighbours_are_told_what_comes_late_the_newest_first_each_in_another_order() -> None:
    relief, _, _ = owing(4)
    assert due(relief, LATE) == [(ANNA, wishes(3, 2, 1)), (BEN, wishes(2, 1, 3))]


@pytest.mark.parametrize("piece_kib", [64, 128, 192])
def test_a_parent_in_time_may_owe_two_pieces_and_what_a_stripe_brings_meanwhile(piece_kib: int) -> None:
    book, made = book_with([header(1, seq, pieces=2, piece_bytes=piece_kib << 10) for seq in range(20)], held=False)
    relief = Relief(TUNING, lambda: [ANNA], lambda stripe: PARENT, book.dealt)
    for chunk in made:
        relief.owes(chunk, 0.0, [])
    ((_, told),) = due(relief, LATE)
    assert isinstance(told, Wishes)
    left = (20 - len(told.seqs)) * 2 * (piece_kib << 10)
    may_owe = 2 * (piece_kib << 10) + TUNING.owed_s * TUNING.stripe_bytes_s
    assert may_owe <= left < may_owe + 2 * (piece_kib << 10)


def test_once_all_is_dealt_what_a_parent_has_not_begun_is_late_at_once() -> None:
    relief, book, made = owing(4)
    piece(relief, book, made[0], 0, PARENT, 0.01)
    seal_all(book, made)
    effects: list[Effect] = []
    relief.due(TUNING.relief_end_s, effects)
    assert said(effects) == [(ANNA, wishes(3, 2, 1)), (BEN, wishes(2, 1, 3))]
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [2 * TUNING.relief_end_s]


def test_the_header_that_was_lacking_has_the_end_begin() -> None:
    book, made = book_with([header(1, seq, pieces=6, piece_bytes=64 << 10) for seq in range(3)], held=False)
    seal_all(book, made)
    relief, effects = Relief(TUNING, lambda: [ANNA], lambda stripe: PARENT, book.dealt), []
    for chunk in made:
        relief.owes(chunk, 0.0, effects)
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [TUNING.relief_end_s]


def test_the_last_piece_of_all_is_left_to_the_parent() -> None:
    relief, book, made = owing(1)
    seal_all(book, made)
    assert due(relief, LATE) == []


def test_a_list_is_said_again_when_it_has_changed_and_before_it_lapses() -> None:
    relief, book, made = owing(3)
    due(relief, LATE)
    assert due(relief, LATE + TUNING.relief_pause_s) == []
    assert len(due(relief, LATE + 0.9 * WISHES_HOLD_S)) == 2
    for index in range(6):
        piece(relief, book, made[0], index, PARENT, LATE + WISHES_HOLD_S)
    assert due(relief, LATE + WISHES_HOLD_S) == [(ANNA, wishes(2)), (BEN, wishes(2))]
    for index in range(6):
        piece(relief, book, made[1], index, PARENT, LATE + WISHES_HOLD_S)
    assert due(relief, LATE + WISHES_HOLD_S) == [(ANNA, Wishes(0, 0, 0, ())), (BEN, Wishes(0, 0, 0, ()))]


def test_the_first_offer_is_taken_and_the_parent_told_to_skip_the_chunk() -> None:
    relief, book, made = owing(3)
    due(relief, LATE)
    assert offered(relief, BEN, made[2], LATE) == [
        (PARENT, Skip(0, *made[2].key)),
        (BEN, WantChunk(*made[2].key, b"")),
    ]
    assert made[2].key in relief
    assert offered(relief, ANNA, made[2], LATE) == [(ANNA, wishes(1))], "who comes second is told what is left"
    for index in range(6):
        piece(relief, book, made[2], index, BEN, LATE)
    assert made[2].key not in relief


def test_what_nobody_owes_us_or_has_begun_to_come_is_not_taken() -> None:
    relief, book, made = owing(3)
    due(relief, LATE)
    piece(relief, book, made[2], 0, PARENT, LATE)
    stranger, _ = book_with([header(1, 9)])
    assert offered(relief, ANNA, made[2], LATE) == [(ANNA, wishes(1))]
    assert offered(relief, ANNA, next(iter(stranger.versions.values())).chunks[9], LATE) == []


def test_what_has_become_due_from_the_parent_meanwhile_is_not_taken() -> None:
    relief, book, made = owing(3)
    due(relief, LATE)
    for index in range(6):
        piece(relief, book, made[0], index, PARENT, LATE)
    for index in range(5):
        piece(relief, book, made[1], index, PARENT, LATE)
    assert offered(relief, ANNA, made[2], LATE) == [(ANNA, wishes(1))], "it may be on its way: it would come twice"


def test_one_neighbour_is_believed_few_promises_at_a_time() -> None:
    relief, _, made = owing(6)
    due(relief, LATE)
    for chunk in made[2:]:
        offered(relief, ANNA, chunk, LATE)
    assert [chunk.key in relief for chunk in made[2:]] == [True] * PROMISES + [False] * (4 - PROMISES)


def test_what_was_promised_and_does_not_come_is_the_parents_again_and_its_giver_not_believed_for_a_while() -> None:
    relief, book, made = owing(3)
    due(relief, LATE)
    offered(relief, ANNA, made[1], LATE)
    piece(relief, book, made[1], 0, ANNA, LATE + 0.1)
    now = LATE + 0.1 + TUNING.relief_deadline_s
    assert (PARENT, WantChunk(*made[1].key, b"\x3e")) in due(relief, now)
    assert made[1].key not in relief
    assert not any(isinstance(m, WantChunk) for _, m in offered(relief, ANNA, made[2], now))
    assert (BEN, WantChunk(*made[2].key, b"")) in offered(relief, BEN, made[2], now)


def test_a_giver_that_is_lost_or_lacks_it_after_all() -> None:
    relief, _, made = owing(4)
    due(relief, LATE)
    offered(relief, ANNA, made[3], LATE)
    offered(relief, BEN, made[2], LATE)
    effects: list[Effect] = []
    relief.lacks(ANNA, made[2].key, effects)  # not who promised it
    assert effects == []
    relief.lacks(BEN, made[2].key, effects)
    assert said(effects) == [(PARENT, WantChunk(*made[2].key, b""))]
    relief.lost(ANNA)
    assert (PARENT, WantChunk(*made[3].key, b"")) in due(relief, LATE)


def test_a_version_that_is_settled_is_wished_for_no_more() -> None:
    relief, _, made = owing(4)
    due(relief, LATE)
    offered(relief, ANNA, made[3], LATE)
    relief.forget(version(1))
    assert made[3].key not in relief
    assert {message for _, message in due(relief, 2 * LATE)} == {Wishes(0, 0, 0, ())}


def test_nobody_to_tell() -> None:
    relief, _, _ = owing(4, neighbours=())
    assert due(relief, LATE) == []
