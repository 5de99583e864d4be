"""The exchange: pushes, credit, and what a child reports to its parent."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_kit import TUNING, book_with, fresh, header, key_of, version

from codec import ChunkKey
from swarm.protocol.core.events import Effect, Ready, Send, SendHeader, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import Attach, Credit, Detach, Have
from swarm.protocol.transfer.chunks import Chunk, Chunks
from swarm.protocol.transfer.edges import BEHIND_BYTES
from swarm.protocol.transfer.exchange import HEADER, LAG_LEAST_S, MAX_AHEAD_BYTES, Exchange
from swarm.protocol.transfer.exchange_context import ExchangeContext

PARENT, ANNA, BEN = (key_of(name).public for name in ("parent", "anna", "ben"))
MUCH = 1 << 40


def attach(stripe: int = 0, credit: int = MUCH, after: int = 0, have: tuple[Have, ...] = ()) -> Attach:
    return Attach(stripe, 0, after, credit, have)


def sent_to(effects: list[Effect], peer: bytes) -> list[tuple[ChunkKey, int]]:
    """(chunk, index) of the parts sent to this peer, in order."""
    return [
        (e.key, e.index if isinstance(e, SendPiece) else HEADER)
        for e in effects
        if isinstance(e, SendHeader | SendPiece) and e.peer == peer
    ]


def size_of(chunk: Chunk, index: int) -> int:
    return chunk.header_bytes if index == HEADER else chunk.sizes[index]


def credits(effects: list[Effect]) -> list[int]:
    return [e.message.total for e in effects if isinstance(e, Send) and isinstance(e.message, Credit)]


def a_chunk(seq: int = 0, **more) -> tuple[Chunks, Exchange, Chunk]:
    book, (chunk,) = book_with([header(1, seq, **more)])
    return book, Exchange(book, TUNING, Outbox()), chunk


# ---------------------------------------------------------------- attaching


def test_attaching_brings_all_chunks_of_the_stripe() -> None:
    book, (chunk, other) = book_with([header(1, 0), header(1, 1, stripe=1)])
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(), 0.0)
    assert sent_to(effects, ANNA) == [(chunk.key, index) for index in (HEADER, 0, 1, 2, 3)]
    assert other.stripe == 1


@given(st.integers(0, 15), st.integers(0, 15))
def test_attaching_with_a_have_map_brings_exactly_what_is_missing(theirs: int, ours: int) -> None:
    book, (chunk,) = book_with([header(1, 0)], held=False)
    for index in range(4):
        if ours >> index & 1:
            book.piece(chunk.key, index, 0.0)
    have = (Have(0, 1, 0, 0, theirs.to_bytes(1, "little")),) if theirs not in (0, 15) else ()
    have = (Have(0, 1, 0, 0, b""),) if theirs == 15 else have
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(have=have), 0.0)
    missing = [index for index in range(4) if ours >> index & 1 and not theirs >> index & 1]
    assert sent_to(effects, ANNA) == [(chunk.key, index) for index in ([] if have else [HEADER]) + missing]


def test_attaching_after_a_version_brings_only_later_ones() -> None:
    book, _ = book_with([header(1, 0), header(2, 0)])
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(after=1), 0.0)
    assert {key.version for key, _ in sent_to(effects, ANNA)} == {2}


def test_a_have_map_of_another_attempt_or_with_excess_bits_is_ignored() -> None:
    _, exchange, chunk = a_chunk()
    effects = fresh(exchange)
    have = (Have(0, 1, 9, 0, b""), Have(0, 1, 0, 7, b""), Have(0, 9, 0, 0, b"\xff" * 128))
    exchange.attached(ANNA, attach(have=have), 0.0)
    assert len(sent_to(effects, ANNA)) == 5
    assert chunk.whole


def test_attaching_again_starts_over() -> None:
    """The child lost its end of the edge, and reports again what it has."""
    book, exchange, _ = a_chunk()
    exchange.attached(ANNA, attach(credit=0), 0.0)
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(have=book.haves(version(0))), 0.0)
    assert sent_to(effects, ANNA) == []
    assert exchange.spare(0, ANNA) == MUCH


def test_attaching_repeatedly_does_not_grow_the_queue() -> None:
    book, (chunk,) = book_with([header(1, 0, pieces=64, piece_bytes=1 << 20)])
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    for _ in range(20):
        exchange.attached(ANNA, attach(), 0.0)
    assert sum(size_of(chunk, index) for _, index in sent_to(effects, ANNA)) <= MAX_AHEAD_BYTES + (21 << 20)


def test_detached_gets_nothing_more() -> None:
    _, exchange, chunk = a_chunk()
    exchange.attached(ANNA, attach(), 0.0)
    exchange.attached(ANNA, attach(stripe=3), 0.0)
    effects = fresh(exchange)
    exchange.detached(ANNA, 0)
    exchange.push(chunk, 0, None, 0.0)
    assert sent_to(effects, ANNA) == []
    assert exchange.spare(0, ANNA) == -1
    exchange.detached(ANNA, None)
    assert exchange.spare(3, ANNA) == -1


def test_detaching_what_was_never_attached() -> None:
    _, exchange, _ = a_chunk()
    effects = fresh(exchange)
    exchange.detached(ANNA, 5)
    exchange.detached(ANNA, None)
    exchange.credited(ANNA, Credit(5, 10), 0.0)
    assert effects == []


def test_moving_to_another_parent_tells_the_old_one() -> None:
    _, exchange, _ = a_chunk()
    exchange.parents.attach_to(0, PARENT, version(0), 0.0)
    effects = fresh(exchange)
    exchange.parents.attach_to(0, BEN, version(0), 0.0)
    assert [(e.peer, type(e.message)) for e in effects if isinstance(e, Send)] == [(PARENT, Detach), (BEN, Attach)]
    assert exchange.parents.lost(PARENT) == []
    assert exchange.parents.lost(BEN) == [0]


# ---------------------------------------------------------------- credit


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12),
    st.integers(0, 3000),
    st.lists(st.integers(0, 8000), max_size=20),
)
def test_a_child_never_gets_more_pieces_than_its_credit(sizes: list[int], allowed: int, more: list[int]) -> None:
    """`more`: 0 if the next piece arrives, else the credit that the child adds."""
    book, (chunk,) = book_with([replace(header(1, 0), piece_bytes=tuple(sizes))], held=False)
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(credit=allowed, have=(Have(0, 1, 0, 0, b"\0"),)), 0.0)
    coming = [HEADER, *range(len(sizes))]
    for step in [*more, *[0] * len(coming), 1 << 20]:
        if step:
            allowed += step
            exchange.credited(ANNA, Credit(0, allowed), 0.0)
        elif coming:
            exchange.push(chunk, coming.pop(0), PARENT, 0.0)
        pieces = [index for _, index in sent_to(effects, ANNA) if index != HEADER]
        assert not pieces or sum(size_of(chunk, index) for index in [HEADER, *pieces]) <= allowed
    assert sent_to(effects, ANNA) == [(chunk.key, index) for index in (HEADER, *range(len(sizes)))]


def test_credit_once_given_stands() -> None:
    _, exchange, _ = a_chunk()
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(credit=1100), 0.0)
    for total in (50, 0, 1099):
        exchange.credited(ANNA, Credit(0, total), 0.0)
    assert exchange.spare(0, ANNA) == 1100 - 100 - 4000
    assert len(sent_to(effects, ANNA)) == 2


def test_boundless_credit_does_not_fill_our_queues() -> None:
    book, (chunk,) = book_with([header(1, 0, pieces=200, piece_bytes=1 << 20)])
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(credit=(1 << 63) - 1), 0.0)
    first = sent_to(effects, ANNA)
    assert sum(size_of(chunk, index) for _, index in first) <= MAX_AHEAD_BYTES + (1 << 20)
    for key, index in first:
        exchange.sent(ANNA, 0, key, index, 0.0)
    assert len(sent_to(effects, ANNA)) > len(first)


def test_credit_returns_as_bytes_arrive() -> None:
    _, exchange, _ = a_chunk()
    effects = fresh(exchange)
    exchange.parents.attach_to(0, PARENT, version(0), 0.0)
    window = exchange.parents.edges[0].allowed
    for _ in range(4 * 16):
        exchange.parents.arrived(PARENT, 0, window // 16, 0.0)
    given = credits(effects)
    assert 4 * window < given[-1] <= 5 * window
    assert given == sorted(given)
    assert len(given) <= 16


def test_a_window_follows_from_the_round_trip() -> None:
    def window(rtt_s: float) -> int:
        book, _ = book_with([])
        exchange = Exchange(book, TUNING, Outbox(), ExchangeContext(lambda peer: rtt_s))
        exchange.parents.attach_to(0, PARENT, version(0), 0.0)
        return exchange.parents.edges[0].allowed

    assert TUNING.window_least_bytes < window(0.005) < window(0.1) < window(0.25) <= TUNING.window_bytes
    assert window(0.0) == window(TUNING.rtt_guess_s)
    assert window(1000.0) == TUNING.window_bytes
    assert window(0.25) >= 0.25 * TUNING.stripe_bytes_s


@pytest.mark.parametrize(("rtt_s", "times"), [(0.02, 1), (0.25, 2), (0.0, 1)])
def test_a_far_parent_that_owes_much_gets_more_credit(rtt_s: float, times: int) -> None:
    book, _ = book_with([])
    exchange = Exchange(book, TUNING, Outbox(), ExchangeContext(lambda peer: rtt_s))
    exchange.parents.attach_to(0, PARENT, version(0), 0.0)
    exchange.parents.attach_to(1, PARENT, version(0), 0.0)
    window = exchange.parents.edges[0].allowed
    for stripe, owes in ((0, 2 * window), (1, window)):
        exchange.parents.note_owed(stripe, owes)
        effects = fresh(exchange)
        exchange.parents.arrived(PARENT, stripe, window, 0.0)
        wanted = times * window if stripe == 0 else window
        assert credits(effects) == [window + min(wanted, TUNING.window_bytes)]
    exchange.parents.note_owed(0, 0)  # it has caught up: granted credit stays, and no more is granted until it is used
    effects = fresh(exchange)
    exchange.parents.arrived(PARENT, 0, window, 0.0)
    assert credits(effects) == ([3 * window] if times == 1 else [])


def test_a_window_holds_two_pieces_however_large() -> None:
    _, exchange, chunk = a_chunk(pieces=4, piece_bytes=128 << 10)
    exchange.parents.attach_to(0, PARENT, version(0), 0.0)
    before = exchange.parents.edges[0].allowed
    effects = fresh(exchange)
    exchange.push(chunk, HEADER, PARENT, 0.0)
    exchange.parents.arrived(PARENT, 0, 128 << 10, 0.0)
    assert credits(effects) == [before + (128 << 10) + 2 * (128 << 10) - TUNING.window_least_bytes]


def test_larger_pieces_raise_the_credit_of_all_parents() -> None:
    """With credit left for less than one piece, nothing would arrive, and so no credit would be granted."""
    _, exchange, chunk = a_chunk(pieces=4, piece_bytes=256 << 10)
    for stripe in range(3):
        exchange.parents.attach_to(stripe, PARENT, version(0), 0.0)
        exchange.parents.arrived(PARENT, stripe, TUNING.window_least_bytes - 1, 0.0)
    effects = fresh(exchange)
    exchange.push(chunk, HEADER, PARENT, 0.0)
    for stripe in range(3):
        assert exchange.parents.edges[stripe].allowed - exchange.parents.edges[stripe].received >= 2 * (256 << 10)
    assert len(credits(effects)) == 3
    exchange.push(chunk, HEADER, PARENT, 0.0)
    assert len(credits(effects)) == 3


def test_bytes_from_other_peers_grant_the_parent_no_credit() -> None:
    _, exchange, _ = a_chunk()
    effects = fresh(exchange)
    exchange.parents.attach_to(0, PARENT, version(0), 0.0)
    exchange.parents.arrived(BEN, 0, MUCH, 0.0)
    exchange.parents.arrived(None, None, MUCH, 0.0)
    assert credits(effects) == []


def behind(effects: list[Effect]) -> list[int]:
    return [e.message.behind for e in effects if isinstance(e, Send) and isinstance(e.message, Credit)]


def relay(pieces: int = 32) -> tuple[Exchange, Chunk, list[Effect]]:
    """A child of PARENT that has no pieces yet, of 128 KiB each."""
    book, (chunk,) = book_with([header(1, 0, pieces=pieces, piece_bytes=128 << 10)])
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.parents.attach_to(0, PARENT, version(0), 0.0)
    return exchange, chunk, effects


def test_credit_tells_how_far_behind_our_children_are_and_when_they_no_longer_are() -> None:
    exchange, chunk, effects = relay()
    exchange.attached(ANNA, attach(credit=0, have=exchange._chunks.haves(version(0))), 0.0)
    for index in range(16):
        exchange.push(chunk, index, PARENT, 0.0)
        exchange.parents.arrived(PARENT, 0, 128 << 10, 0.0)
    total = credits(effects)[-1]
    assert total > 16 * (128 << 10)  # arrived bytes are granted again, forwarded or not
    assert behind(effects)[-1] > BEHIND_BYTES
    effects.clear()
    exchange.credited(ANNA, Credit(0, MUCH), 0.0)
    for index in range(16):
        exchange.sent(ANNA, 0, chunk.key, index, 0.0)
    assert credits(effects) == [total]  # no new credit, but the report
    assert behind(effects)[0] < BEHIND_BYTES


def test_one_child_of_many_that_is_late_does_not_hold_back_the_stripe() -> None:
    exchange, chunk, effects = relay()
    have = exchange._chunks.haves(version(0))
    exchange.attached(ANNA, attach(credit=0, have=have), 0.0)
    for number in range(7):
        exchange.attached(key_of(number).public, attach(have=have), 0.0)
    for index in range(16):
        exchange.push(chunk, index, PARENT, 0.0)
        for number in range(7):
            exchange.sent(key_of(number).public, 0, chunk.key, index, 0.0)
        exchange.parents.arrived(PARENT, 0, 128 << 10, 0.0)
    assert exchange.children[0][ANNA].backlog > 2 * BEHIND_BYTES
    assert max(behind(effects)) < BEHIND_BYTES


def test_a_child_that_lags_does_not_count_as_behind() -> None:
    exchange, chunk, effects = relay()
    exchange.attached(ANNA, attach(credit=0, have=exchange._chunks.haves(version(0))), 0.0)
    for index in range(16):
        exchange.push(chunk, index, PARENT, 0.0)
        exchange.parents.arrived(PARENT, 0, 128 << 10, 0.0)
    effects.clear()
    exchange.tick(TUNING.lag_after_s + 0.01)
    assert behind(effects) == [0]
    exchange.credited(ANNA, Credit(0, MUCH), 2.0)  # it takes data again, and counts again
    exchange.sent(ANNA, 0, chunk.key, 0, 2.0)
    assert exchange.children[0][ANNA].lagging is False


def test_accepted_headers_do_not_hide_that_a_child_lags() -> None:
    book, chunks = book_with([header(1, seq, pieces=1, piece_bytes=1000) for seq in range(4)])
    exchange = Exchange(book, TUNING, Outbox())
    exchange.attached(BEN, attach(credit=0, have=book.haves(version(0))), 0.0)
    exchange.push(chunks[0], 0, PARENT, 0.0)
    for at, chunk in enumerate(chunks[1:], 1):
        exchange.push(chunk, HEADER, PARENT, 0.2 * at)
        exchange.sent(BEN, 0, chunk.key, HEADER, 0.2 * at)
    exchange.tick(LAG_LEAST_S + 0.01)
    assert exchange.children[0][BEN].lagging


def test_chunks_of_a_lost_parent_are_pulled_sooner_than_late_ones() -> None:
    _, exchange, _ = a_chunk()
    exchange.parents.attach_to(0, PARENT, version(0), 10.0)
    assert exchange.parents.progress_at[0] == 10.0
    exchange.parents.attach_to(0, BEN, version(0), 10.0, failover=True)
    assert 10.0 - TUNING.pull_after_s < exchange.parents.progress_at[0] < 10.0
    assert exchange.parents.patient_s < TUNING.pull_after_s
    exchange.parents.attach_to(0, PARENT, version(0), 11.0)
    exchange.parents.arrived(PARENT, 0, 1000, 12.0)
    assert exchange.parents.progress_at[0] == 12.0


def test_a_frame_of_another_peer_is_not_progress_of_the_stripe() -> None:
    """The stripe of a frame is not signed: otherwise any member could keep us from pulling what a parent withholds."""
    _, exchange, _ = a_chunk()
    exchange.parents.attach_to(0, PARENT, version(0), 10.0)
    exchange.parents.arrived(BEN, 0, 1000, 12.0)
    assert exchange.parents.progress_at[0] == 10.0
    exchange.parents.moved(0, 12.0)
    assert exchange.parents.progress_at[0] == 12.0


# ---------------------------------------------------------------- skipping


def overloaded() -> tuple[Exchange, list[Chunk], list[Effect]]:
    """BEN grants no credit, so none of the four chunks of 512 KiB was sent to it."""
    book, chunks = book_with([header(1, seq, pieces=4, piece_bytes=128 << 10) for seq in range(4)])
    exchange = Exchange(book, TUNING, Outbox())
    effects = fresh(exchange)
    exchange.attached(BEN, attach(credit=0, have=book.haves(version(0))), 0.0)
    for chunk in chunks:
        for index in (HEADER, 0, 1, 2, 3):
            exchange.push(chunk, index, PARENT, 0.0)
    return exchange, chunks, effects


def test_headers_are_sent_ahead_of_the_queue() -> None:
    _, chunks, effects = overloaded()
    assert sent_to(effects, BEN) == [(chunk.key, HEADER) for chunk in chunks]


def test_a_skipped_chunk_is_not_sent_unless_requested_again() -> None:
    exchange, chunks, effects = overloaded()
    effects.clear()
    exchange.skip(BEN, 0, chunks[1].key)
    exchange.skip(BEN, 0, chunks[2].key)
    exchange.push(chunks[2], 3, PARENT, 0.0)
    assert not exchange.take_back(BEN, chunks[0], 0b1111, 0.0)
    assert exchange.take_back(BEN, chunks[2], 0b1010, 0.0)
    edge = exchange.children[0][BEN]
    assert edge.waiting_bytes == sum(size for _, _, size in edge.waiting) == (4 + 4 + 2) * (128 << 10)
    exchange.credited(BEN, Credit(0, MUCH), 0.0)
    for chunk in chunks:
        for index in (HEADER, 0, 1, 2, 3):
            exchange.sent(BEN, 0, chunk.key, index, 0.0)
    expected = {(chunk.key, index) for chunk in (chunks[0], chunks[3]) for index in range(4)}
    assert set(sent_to(effects, BEN)) == expected | {(chunks[2].key, 1), (chunks[2].key, 3)}


def test_with_too_little_uplink_children_get_different_chunks_first() -> None:
    book, chunks = book_with([header(1, seq, pieces=4, piece_bytes=32 << 10) for seq in range(3)])
    exchange = Exchange(book, TUNING, Outbox())
    whole = 4 * (32 << 10)
    for peer in (ANNA, BEN, PARENT):
        exchange.attached(peer, attach(credit=0), 0.0)
    effects = fresh(exchange)
    for peer in (ANNA, BEN, PARENT):
        exchange.credited(peer, Credit(0, whole + 3 * 100), 0.0)
    first = [[key.seq for key, _ in sent_to(effects, peer)] for peer in (ANNA, BEN, PARENT)]
    assert first == [[0] * 4, [1] * 4, [2] * 4]
    for peer in (ANNA, BEN, PARENT):
        for seq in first.pop(0)[:1]:
            for index in range(4):
                exchange.sent(peer, 0, chunks[seq].key, index, 0.0)
        effects.clear()
        exchange.credited(peer, Credit(0, MUCH), 0.0)
        for chunk in chunks:
            for index in range(4):
                exchange.sent(peer, 0, chunk.key, index, 0.0)
        assert len(sent_to(effects, peer)) == 8


def test_a_skip_from_a_peer_that_is_not_a_child() -> None:
    exchange, chunks, _ = overloaded()
    exchange.skip(ANNA, 0, chunks[0].key)
    exchange.skip(BEN, 5, chunks[0].key)
    assert not exchange.take_back(ANNA, chunks[0], 0b1111, 0.0)
    assert exchange.waiting_bytes == 16 * (128 << 10)


def test_pieces_that_keep_coming_do_not_hide_that_a_child_lags() -> None:
    book, (chunk,) = book_with([header(1, 0, pieces=16)])
    exchange = Exchange(book, TUNING, Outbox())
    exchange.attached(ANNA, attach(credit=0, have=book.haves(version(0))), 0.0)
    for index in range(16):
        exchange.push(chunk, index, PARENT, index * TUNING.lag_after_s / 4)
    exchange.tick(4 * TUNING.lag_after_s)
    assert exchange.children[0][ANNA].lagging


def test_a_part_of_a_forgotten_chunk_still_leaves_the_backlog() -> None:
    """A version was dropped while some of its pieces were handed to the socket."""
    book, exchange, chunk = a_chunk()
    exchange.attached(ANNA, attach(), 0.0)
    book.drop(version(1))
    exchange.forget(version(1))
    for index in (HEADER, 0, 1, 2, 3):
        exchange.sent(ANNA, 0, chunk.key, index, 0.0)
    assert exchange.children[0][ANNA].backlog == 0


def test_queued_parts_of_a_dropped_version_are_not_sent() -> None:
    book, exchange, _ = a_chunk()
    exchange.attached(ANNA, attach(credit=0), 0.0)
    book.drop(version(1))
    exchange.forget(version(1))
    effects = fresh(exchange)
    exchange.credited(ANNA, Credit(0, MUCH), 0.0)
    assert effects == []
    assert exchange.children[0][ANNA].waiting_bytes == 0


def test_sent_twice_or_never_sent_counts_once() -> None:
    _, exchange, chunk = a_chunk()
    exchange.attached(ANNA, attach(), 0.0)
    for _ in range(3):
        exchange.sent(ANNA, 0, chunk.key, 0, 0.0)
    exchange.sent(ANNA, 0, header(9, 9).key, 0, 0.0)
    assert exchange.children[0][ANNA].flying_bytes == 100 + 3 * 1000


def test_pulled_bytes_count_on_the_edge_at_both_ends() -> None:
    _, exchange, chunk = a_chunk()
    exchange.attached(ANNA, attach(credit=10_000), 0.0)
    before = exchange.spare(0, ANNA)
    exchange.gave(ANNA, chunk, [0, 2], 2.0)
    exchange.gave(BEN, chunk, [0, 2], 2.0)
    assert before - exchange.spare(0, ANNA) == 100 + 2000


# ---------------------------------------------------------------- pushing on


def test_a_piece_goes_to_every_child_of_its_stripe_but_the_one_it_came_from() -> None:
    _, exchange, chunk = a_chunk()
    for peer in (ANNA, BEN, PARENT):
        exchange.attached(peer, attach(have=(Have(0, 1, 0, 0, b""),)), 0.0)
    exchange.attached(key_of("other").public, attach(stripe=1), 0.0)
    effects = fresh(exchange)
    exchange.push(chunk, 2, PARENT, 0.0)
    assert [e.peer for e in effects if isinstance(e, SendPiece)] == [ANNA, BEN]


@pytest.mark.parametrize("after", [1, 2])
def test_a_child_that_is_ahead_is_not_sent_the_past(after: int) -> None:
    _, exchange, chunk = a_chunk()
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(after=after), 0.0)
    exchange.push(chunk, 0, None, 0.0)
    assert effects == [Ready(ANNA)]


def test_a_child_has_a_stream_before_there_is_data_to_send() -> None:
    _, exchange, _ = a_chunk()
    effects = fresh(exchange)
    for stripe in (0, 3, 0):
        exchange.attached(ANNA, attach(stripe=stripe, after=1), 0.0)
    assert effects == [Ready(ANNA)]  # once, for any number of stripes
    exchange.detached(ANNA, None)
    exchange.attached(ANNA, attach(after=1), 0.0)
    assert effects == [Ready(ANNA)] * 2


def test_a_chunk_of_no_known_stripe_is_not_pushed() -> None:
    _, exchange, chunk = a_chunk(stripe=None)
    effects = fresh(exchange)
    exchange.attached(ANNA, attach(), 0.0)
    exchange.push(chunk, 0, None, 0.0)
    assert sent_to(effects, ANNA) == []


def test_a_crowd_of_late_joiners_costs_one_look_and_does_not_delay_planned_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten members that attach to every stripe once made the trainer count all edges for each after each piece."""
    book, (chunk,) = book_with([header(1, 0)])
    exchange = Exchange(book, TUNING, Outbox(), ExchangeContext(entitled=lambda stripe, peer: peer == ANNA))
    crowd = [key_of(f"guest {i}").public for i in range(10)]
    looks: list[float] = []
    monkeypatch.setattr(exchange, "has_time", lambda now: looks.append(now) or True)
    for peer in (ANNA, *crowd):
        exchange.attached(peer, attach(have=(Have(0, 1, 0, 0, b""),)), 0.0)
    looks.clear()
    effects = fresh(exchange)
    exchange.push(chunk, 2, None, 0.0)
    pieces = [e for e in effects if isinstance(e, SendPiece)]
    assert {e.peer: e.late_joiner for e in pieces} == {ANNA: False, **dict.fromkeys(crowd, True)}
    assert pieces[0].peer == ANNA
    assert len(looks) == 1
