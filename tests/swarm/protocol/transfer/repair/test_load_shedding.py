"""Load shedding: late chunks are wanted, taken from neighbours that offer them, and from the parent if those fail."""

import pytest
from member_kit import a_forwarder
from protocol_kit import SWARM, TUNING, book_with, fresh, header, key_of, manifest, version

from codec import open_manifest
from swarm.protocol.core.events import Effect, Send, SetTimer, Timer
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import LateChunkWants, Skip, WantChunk
from swarm.protocol.transfer.chunks import Chunk, Chunks
from swarm.protocol.transfer.exchange import Exchange
from swarm.protocol.transfer.repair.load_shedding import LATE_WANTS_HOLD_S, PROMISES, LoadShedding

PARENT, ANNA, BEN = (key_of(name).public for name in ("parent", "anna", "ben"))
LATE = TUNING.load_shedding_after_s


def shedding(book: Chunks, *neighbours: bytes) -> LoadShedding:
    """`LoadShedding` of a member whose parent in every stripe is PARENT."""
    exchange = Exchange(book, TUNING, Outbox())
    for stripe in range(TUNING.stripes):
        exchange.parents.attach_to(stripe, PARENT, version(0), 0.0)
    return LoadShedding(TUNING, Outbox(), exchange.parents, neighbours=lambda: list(neighbours), assigned=book.assigned)


def owed(load_shedding: LoadShedding, stripe: int) -> int:
    return load_shedding._parents._owed_bytes.get(stripe, 0)


def with_late_chunks(
    chunks: int, neighbours: tuple[bytes, ...] = (ANNA, BEN)
) -> tuple[LoadShedding, Chunks, list[Chunk]]:
    """The headers of these chunks of 384 KiB arrived at time 0.0, without their pieces."""
    book, made = book_with([header(1, seq, pieces=6, piece_bytes=64 << 10) for seq in range(chunks)], held=False)
    load_shedding = shedding(book, *neighbours)
    effects = fresh(load_shedding)
    for chunk in made:
        load_shedding.owes(chunk, 0.0)
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [LATE]
    return load_shedding, book, made


def look_for_late_chunks(load_shedding: LoadShedding, now: float) -> list[tuple[bytes, object]]:
    effects = fresh(load_shedding)
    load_shedding.due(now)
    return sent_messages(effects)


def sent_messages(effects: list[Effect]) -> list[tuple[bytes, object]]:
    return [(e.peer, e.message) for e in effects if isinstance(e, Send)]


def receive_offer(load_shedding: LoadShedding, peer: bytes, chunk: Chunk, now: float) -> list[tuple[bytes, object]]:
    effects = fresh(load_shedding)
    load_shedding.offered(peer, chunk.key, now)
    return sent_messages(effects)


def receive_piece(load_shedding: LoadShedding, book: Chunks, chunk: Chunk, index: int, peer: bytes, now: float) -> None:
    book.piece(chunk.key, index, now)
    load_shedding.arrived(chunk, peer, now)


def seal_all(book: Chunks, chunks: list[Chunk]) -> None:
    """Record the seal of a version with these chunks."""
    sealed = manifest(1, len(chunks))
    book.manifest(open_manifest(sealed, SWARM), sealed, 0.0)


def wants(*seqs: int) -> LateChunkWants:
    return LateChunkWants(0, 1, 0, seqs)


def test_a_parent_that_owes_little_is_left_alone() -> None:
    load_shedding, _, _ = with_late_chunks(1)
    assert look_for_late_chunks(load_shedding, LATE) == []


def test_it_notes_what_a_parent_owed_at_the_last_look() -> None:
    load_shedding, book, chunks = with_late_chunks(5)
    assert owed(load_shedding, 0) == 0
    look_for_late_chunks(load_shedding, LATE)
    assert owed(load_shedding, 0) == 5 * 6 * (64 << 10)
    receive_offer(load_shedding, ANNA, chunks[1], LATE)  # Anna brings it
    receive_piece(load_shedding, book, chunks[0], 0, PARENT, LATE)
    look_for_late_chunks(load_shedding, 2 * LATE)
    assert owed(load_shedding, 0) == (4 * 6 - 1) * (64 << 10)
    load_shedding.forget(version(1))
    look_for_late_chunks(load_shedding, 3 * LATE)
    assert owed(load_shedding, 0) == 0
    assert owed(load_shedding, 1) == 0


def test_a_members_credit_follows_what_its_parent_owes() -> None:
    member = a_forwarder()
    assert 0 in member.state.exchange.parents.edges
    for seq in range(5):
        member.apply(header(1, seq, pieces=6, piece_bytes=64 << 10), 1.0)
    member.apply(Timer("load-shedding"), 1.0 + LATE)
    assert member.state.exchange.parents._owed_bytes[0] == 5 * 6 * (64 << 10)


def test_young_chunks_are_not_wanted() -> None:
    load_shedding, _, _ = with_late_chunks(4)
    assert look_for_late_chunks(load_shedding, LATE / 2) == []


def test_neighbours_are_told_late_chunks_newest_first_each_in_another_order() -> None:
    load_shedding, _, _ = with_late_chunks(4)
    assert look_for_late_chunks(load_shedding, LATE) == [(ANNA, wants(3, 2, 1)), (BEN, wants(2, 1, 3))]


@pytest.mark.parametrize("piece_kib", [64, 128, 192])
def test_a_healthy_parent_may_owe_two_pieces_and_owed_s_of_throughput(piece_kib: int) -> None:
    book, made = book_with([header(1, seq, pieces=2, piece_bytes=piece_kib << 10) for seq in range(20)], held=False)
    load_shedding = shedding(book, ANNA)
    for chunk in made:
        load_shedding.owes(chunk, 0.0)
    ((_, wants_sent),) = look_for_late_chunks(load_shedding, LATE)
    assert isinstance(wants_sent, LateChunkWants)
    left = (20 - len(wants_sent.seqs)) * 2 * (piece_kib << 10)
    may_owe = 2 * (piece_kib << 10) + TUNING.owed_s * TUNING.stripe_bytes_s
    assert may_owe <= left < may_owe + 2 * (piece_kib << 10)


def test_once_all_is_assigned_what_a_parent_has_not_begun_is_late_at_once() -> None:
    load_shedding, book, made = with_late_chunks(4)
    receive_piece(load_shedding, book, made[0], 0, PARENT, 0.01)
    seal_all(book, made)
    effects = fresh(load_shedding)
    load_shedding.due(TUNING.load_shedding_end_s)
    assert sent_messages(effects) == [(ANNA, wants(3, 2, 1)), (BEN, wants(2, 1, 3))]
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [2 * TUNING.load_shedding_end_s]


def test_the_last_missing_header_begins_the_end_phase() -> None:
    book, made = book_with([header(1, seq, pieces=6, piece_bytes=64 << 10) for seq in range(3)], held=False)
    seal_all(book, made)
    load_shedding = shedding(book, ANNA)
    effects = fresh(load_shedding)
    for chunk in made:
        load_shedding.owes(chunk, 0.0)
    assert [e.at for e in effects if isinstance(e, SetTimer)] == [TUNING.load_shedding_end_s]


def test_the_last_piece_of_all_is_left_to_the_parent() -> None:
    load_shedding, book, made = with_late_chunks(1)
    seal_all(book, made)
    assert look_for_late_chunks(load_shedding, LATE) == []


def test_a_list_is_repeated_when_it_changes_and_before_it_expires() -> None:
    load_shedding, book, made = with_late_chunks(3)
    look_for_late_chunks(load_shedding, LATE)
    assert look_for_late_chunks(load_shedding, LATE + TUNING.load_shedding_pause_s) == []
    assert len(look_for_late_chunks(load_shedding, LATE + 0.9 * LATE_WANTS_HOLD_S)) == 2
    for index in range(6):
        receive_piece(load_shedding, book, made[0], index, PARENT, LATE + LATE_WANTS_HOLD_S)
    assert look_for_late_chunks(load_shedding, LATE + LATE_WANTS_HOLD_S) == [(ANNA, wants(2)), (BEN, wants(2))]
    for index in range(6):
        receive_piece(load_shedding, book, made[1], index, PARENT, LATE + LATE_WANTS_HOLD_S)
    assert look_for_late_chunks(load_shedding, LATE + LATE_WANTS_HOLD_S) == [
        (ANNA, LateChunkWants(0, 0, 0, ())),
        (BEN, LateChunkWants(0, 0, 0, ())),
    ]


def test_the_first_offer_is_taken_and_the_parent_told_to_skip_the_chunk() -> None:
    load_shedding, book, made = with_late_chunks(3)
    look_for_late_chunks(load_shedding, LATE)
    assert receive_offer(load_shedding, BEN, made[2], LATE) == [
        (PARENT, Skip(0, *made[2].key)),
        (BEN, WantChunk(*made[2].key, b"")),
    ]
    assert made[2].key in load_shedding
    assert receive_offer(load_shedding, ANNA, made[2], LATE) == [(ANNA, wants(1))], (
        "the second neighbour learns which chunks remain"
    )
    for index in range(6):
        receive_piece(load_shedding, book, made[2], index, BEN, LATE)
    assert made[2].key not in load_shedding


def test_offers_of_chunks_not_owed_or_already_begun_are_not_taken() -> None:
    load_shedding, book, made = with_late_chunks(3)
    look_for_late_chunks(load_shedding, LATE)
    receive_piece(load_shedding, book, made[2], 0, PARENT, LATE)
    stranger, _ = book_with([header(1, 9)])
    assert receive_offer(load_shedding, ANNA, made[2], LATE) == [(ANNA, wants(1))]
    assert receive_offer(load_shedding, ANNA, next(iter(stranger.versions.values())).chunks[9], LATE) == []


def test_offers_of_chunks_that_are_not_late_any_more_are_not_taken() -> None:
    load_shedding, book, made = with_late_chunks(3)
    look_for_late_chunks(load_shedding, LATE)
    for index in range(6):
        receive_piece(load_shedding, book, made[0], index, PARENT, LATE)
    for index in range(5):
        receive_piece(load_shedding, book, made[1], index, PARENT, LATE)
    assert receive_offer(load_shedding, ANNA, made[2], LATE) == [(ANNA, wants(1))], (
        "the parent may have sent it already, so it would arrive twice"
    )


def test_few_promises_of_one_neighbour_are_accepted_at_a_time() -> None:
    load_shedding, _, made = with_late_chunks(6)
    look_for_late_chunks(load_shedding, LATE)
    for chunk in made[2:]:
        receive_offer(load_shedding, ANNA, chunk, LATE)
    assert [chunk.key in load_shedding for chunk in made[2:]] == [True] * PROMISES + [False] * (4 - PROMISES)


def test_a_broken_promise_goes_back_to_the_parent_and_bars_its_giver_for_a_while() -> None:
    load_shedding, book, made = with_late_chunks(3)
    look_for_late_chunks(load_shedding, LATE)
    receive_offer(load_shedding, ANNA, made[1], LATE)
    receive_piece(load_shedding, book, made[1], 0, ANNA, LATE + 0.1)
    now = LATE + 0.1 + TUNING.load_shedding_deadline_s
    assert (PARENT, WantChunk(*made[1].key, b"\x3e")) in look_for_late_chunks(load_shedding, now)
    assert made[1].key not in load_shedding
    assert not any(isinstance(m, WantChunk) for _, m in receive_offer(load_shedding, ANNA, made[2], now))
    assert (BEN, WantChunk(*made[2].key, b"")) in receive_offer(load_shedding, BEN, made[2], now)


def test_a_giver_that_is_lost_or_lacks_the_chunk() -> None:
    load_shedding, _, made = with_late_chunks(4)
    look_for_late_chunks(load_shedding, LATE)
    receive_offer(load_shedding, ANNA, made[3], LATE)
    receive_offer(load_shedding, BEN, made[2], LATE)
    effects = fresh(load_shedding)
    load_shedding.lacks(ANNA, made[2].key)  # not the neighbour that promised it
    assert effects == []
    load_shedding.lacks(BEN, made[2].key)
    assert sent_messages(effects) == [(PARENT, WantChunk(*made[2].key, b""))]
    load_shedding.lost(ANNA)
    assert (PARENT, WantChunk(*made[3].key, b"")) in look_for_late_chunks(load_shedding, LATE)


def test_chunks_of_an_applied_version_are_not_wanted() -> None:
    load_shedding, _, made = with_late_chunks(4)
    look_for_late_chunks(load_shedding, LATE)
    receive_offer(load_shedding, ANNA, made[3], LATE)
    load_shedding.forget(version(1))
    assert made[3].key not in load_shedding
    assert {message for _, message in look_for_late_chunks(load_shedding, 2 * LATE)} == {LateChunkWants(0, 0, 0, ())}


def test_without_neighbours() -> None:
    load_shedding, _, _ = with_late_chunks(4, neighbours=())
    assert look_for_late_chunks(load_shedding, LATE) == []
