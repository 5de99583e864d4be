"""The record of chunks and pieces: attempts, seals, and refused chunks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_kit import SWARM, book_with, fresh, header, manifest, version

from codec import open_manifest
from swarm.protocol.core.events import Drop, HeaderStored
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.transfer.chunks import Chunks, bits_of, mask_of


def seal(book: Chunks, sealed: bytes):
    return book.manifest(open_manifest(sealed, SWARM), sealed, 0.0)


@given(st.integers(1, 1024), st.data())
def test_piece_sets_round_trip(pieces: int, data: st.DataObject) -> None:
    full = (1 << pieces) - 1
    mask = data.draw(st.integers(0, full))
    travelling = bits_of(mask, full)
    assert mask_of(travelling, full) == mask
    assert len(travelling) <= 128


@given(st.binary(max_size=128), st.integers(1, 64))
def test_a_piece_set_names_no_piece_that_is_not_there(bits: bytes, pieces: int) -> None:
    full = (1 << pieces) - 1
    assert mask_of(bits, full) | full == full


def test_a_chunk_is_complete_with_its_last_piece_in_any_order() -> None:
    book, (chunk,) = book_with([header(1, 0, pieces=3)], held=False)
    for index in (2, 0):
        assert book.piece(chunk.key, index, 1.0) == (chunk, True)
    assert not chunk.whole
    assert list(chunk.held()) == [0, 2]
    assert book.piece(chunk.key, 2, 1.0) == (chunk, False)
    assert book.piece(chunk.key, 1, 2.0) == (chunk, True)
    assert chunk.whole
    assert book.versions[version(1)].progress_at == 2.0
    assert list(book.versions[version(1)].unstaged) == [0]


@pytest.mark.parametrize("index", [3, 1000])
def test_a_piece_out_of_range(index: int) -> None:
    book, (chunk,) = book_with([header(1, 0, pieces=3)], held=False)
    assert book.piece(chunk.key, index, 1.0) is None
    assert chunk.have == 0


def test_a_piece_of_an_unknown_chunk() -> None:
    book, _ = book_with([header(1, 0)])
    assert book.piece(header(1, 1).key, 0, 0.0) is None
    assert book.piece(header(2, 0).key, 0, 0.0) is None
    assert book.piece(header(1, 0, attempt=1).key, 0, 0.0) is None


def test_a_repeated_header_is_not_new_but_tells_its_stripe() -> None:
    book, (chunk,) = book_with([header(1, 0, stripe=None)])
    assert book.header(header(1, 0, stripe=5), 0.0) == (chunk, False)
    assert chunk.stripe == 5
    assert book.header(header(1, 0, stripe=6), 0.0) == (chunk, False)
    assert chunk.stripe == 5


def test_a_later_attempt_drops_what_an_earlier_one_left() -> None:
    book, _ = book_with([header(1, 0), header(1, 1)])
    before = book.versions[version(1)].generation
    effects = fresh(book)
    taken = book.header(header(1, 0, attempt=1), 0.0)
    assert taken is not None
    assert effects == [Drop(version(1), 0)]
    assert list(book.versions[version(1)].chunks) == [0]
    assert book.versions[version(1)].generation > before
    assert book.versions[version(1)].done_chunks == 0


def test_an_earlier_attempt_is_dropped_on_arrival() -> None:
    book, _ = book_with([header(1, 0, attempt=1)])
    effects = fresh(book)
    assert book.header(header(1, 1), 0.0) is None
    assert effects == [Drop(version(1), 0)]


def test_a_sealed_version_stands_against_a_later_attempt() -> None:
    book, _ = book_with([header(1, 0)])
    assert seal(book, manifest(1, 1)) is not None
    assert book.header(header(1, 0, attempt=1), 0.0) is None
    assert seal(book, manifest(1, 1, attempt=1)) is None
    assert book.versions[version(1)].complete


def test_the_seal_of_a_later_attempt_drops_the_earlier_one() -> None:
    book, _ = book_with([header(1, 0)])
    effects = fresh(book)
    sealed = seal(book, manifest(1, 2, attempt=1))
    assert sealed is not None
    assert effects == [Drop(version(1), 0)]
    assert list(sealed.missing()) == [0, 1]


def test_a_version_is_complete_when_all_listed_chunks_are() -> None:
    book, chunks = book_with([header(1, 0), header(1, 1)], held=False)
    sealed = seal(book, manifest(1, 2))
    assert sealed is not None
    for chunk in chunks:
        assert not sealed.complete
        for index in range(4):
            book.piece(chunk.key, index, 0.0)
    assert sealed.complete
    assert list(sealed.missing()) == []


def test_a_manifest_before_any_chunk() -> None:
    book = Chunks(Outbox())
    sealed = seal(book, manifest(1, 3))
    assert sealed is not None
    assert list(sealed.missing()) == [0, 1, 2]
    assert seal(book, manifest(1, 3)) is None


def test_an_empty_version_is_complete_with_its_seal() -> None:
    sealed = seal(Chunks(Outbox()), manifest(1, 0))
    assert sealed is not None
    assert sealed.complete


def unlisted(seq: int) -> HeaderStored:
    known = header(1, seq)
    return HeaderStored(None, 0, known.key, b"\x01" * 32, known.parent_root, known.piece_bytes, 100)


@pytest.mark.parametrize("seq", [0, 7])
def test_chunks_that_the_seal_does_not_list_are_dropped_and_refused(seq: int) -> None:
    """Otherwise a version with a complete chunk that is not the listed one could never become complete."""
    book, _ = book_with([unlisted(seq)])
    sealed = seal(book, manifest(1, 1))
    assert sealed is not None
    assert sealed.chunks == {}
    assert book.header(unlisted(seq), 0.0) is None
    taken = book.header(header(1, 0), 0.0)
    assert taken is not None
    for index in range(4):
        book.piece(taken[0].key, index, 0.0)
    assert sealed.complete


def test_a_chunk_without_pieces_is_whole() -> None:
    book, (chunk,) = book_with([header(1, 0, pieces=0)])
    sealed = seal(book, manifest(1, 1))
    assert chunk.whole
    assert sealed is not None
    assert sealed.complete


def test_haves_list_the_chunks_of_later_versions() -> None:
    book, chunks = book_with([header(1, 0), header(2, 0), header(2, 1), header(3, 0)], held=False)
    for chunk in chunks[:3]:
        book.piece(chunk.key, 1, 0.0)
    for index in range(4):
        book.piece(chunks[2].key, index, 0.0)
    assert [(h.version, h.seq, h.pieces) for h in book.haves(version(1))] == [(2, 0, b"\x02"), (2, 1, b"")]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), max_size=60))
def test_counts_are_consistent_after_any_events(news: list[tuple[int, int, int, int]]) -> None:
    book = Chunks(Outbox())
    for what, attempt, seq, index in news:
        if what == 0:
            book.header(header(1, seq, attempt=attempt), 0.0)
        elif what == 1:
            book.piece(header(1, seq, attempt=attempt).key, index, 0.0)
        else:
            seal(book, manifest(1, 1 + seq, attempt=attempt))
        for entry in book.versions.values():
            whole = {s for s, c in entry.chunks.items() if c.whole}
            assert entry.done_chunks == len(whole)
            assert set(entry.unstaged) == whole
            assert all(c.key.attempt == entry.attempt for c in entry.chunks.values())
            if entry.manifest is not None:
                assert entry.complete == (whole == set(range(len(entry.manifest.chunk_ids))))
