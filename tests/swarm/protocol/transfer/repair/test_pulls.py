"""Pulls: which source is asked for which chunk and when."""

from protocol_kit import TUNING, book_with, fresh, header, key_of, manifest, sends, version

from codec import open_manifest
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import WantChunk
from swarm.protocol.transfer.chunks import Chunks, Version
from swarm.protocol.transfer.repair.pulls import PASSED_BY, Pulls

ANNA, BEN, LAST = (key_of(name).public for name in ("anna", "ben", "last"))
LATE = TUNING.pull_after_s + 0.01


def sealed_version(chunks: int, have: int = 0) -> tuple[Chunks, Version]:
    """Version 1, with the first `have` chunks complete."""
    book, _ = book_with([header(1, seq) for seq in range(have)])
    sealed = manifest(1, chunks)
    made = book.manifest(open_manifest(sealed, key_of("authority").public), sealed, 0.0)
    assert made is not None
    return book, made


def tick(
    pulls: Pulls, versions: list[Version], now: float, sources=(ANNA, BEN, LAST), progress=None, **more
) -> list[WantChunk]:
    effects = fresh(pulls)
    pulls.tick(versions, progress or {}, lambda stripe: list(sources), now, **more)
    return sends(effects, WantChunk)


def requests_to(pulls: Pulls, versions: list[Version], now: float, **more) -> list[bytes]:
    effects = fresh(pulls)
    pulls.tick(versions, {}, lambda stripe: [ANNA, BEN, LAST], now, **more)
    return [effect.peer for effect in effects]  # type: ignore[attr-defined]


def lacks(pulls: Pulls, peer: bytes) -> None:
    pulls.lacks(peer, header(1, 0).key)


def test_chunks_that_may_still_come_are_not_pulled() -> None:
    _, made = sealed_version(3)
    assert tick(Pulls(TUNING, Outbox()), [made], TUNING.pull_after_s) == []


def test_stripes_without_progress_are_pulled_a_few_chunks_at_a_time() -> None:
    _, made = sealed_version(30)
    wants = tick(Pulls(TUNING, Outbox()), [made], LATE)
    assert [w.seq for w in wants] == list(range(TUNING.pulls_in_flight))
    assert all(w.pieces == b"" for w in wants)


def test_only_missing_pieces_are_asked_for() -> None:
    book, (chunk,) = book_with([header(1, 0)], held=False)
    book.piece(chunk.key, 1, 0.0)
    (want,) = tick(Pulls(TUNING, Outbox()), [book.versions[version(1)]], LATE)
    assert want.pieces == b"\x0d"


def test_a_stripe_that_moves_is_left_alone() -> None:
    book, (chunk,) = book_with([header(1, 0, stripe=3)], held=False)
    made = book.versions[version(1)]
    assert tick(Pulls(TUNING, Outbox()), [made], LATE, progress={3: LATE - 0.1}) == []
    assert len(tick(Pulls(TUNING, Outbox()), [made], LATE, progress={3: 0.0, 4: LATE})) == 1
    assert not chunk.whole


def test_chunks_that_a_later_version_overtook_are_pulled() -> None:
    """Trees keep the order, so it is not coming; while later versions arrive it would otherwise never be pulled."""
    book, _ = book_with([header(1, 0, stripe=3), header(2, 0, stripe=3)], held=False)
    versions = [book.versions[version(1)], book.versions[version(2)]]
    assert [w.version for w in tick(Pulls(TUNING, Outbox()), versions, LATE, progress={3: LATE})] == [1]


def test_one_source_at_a_time_the_last_one_last() -> None:
    _, made = sealed_version(1)
    pulls = Pulls(TUNING, Outbox())
    order = []
    for turn in range(3):
        order += requests_to(pulls, [made], LATE + turn * (TUNING.pull_deadline_s + 0.01))
    assert order == [ANNA, BEN, LAST]
    assert requests_to(pulls, [made], LATE + 0.5) == []


def test_after_all_sources_were_asked_there_is_a_pause() -> None:
    _, made = sealed_version(1)
    pulls = Pulls(TUNING, Outbox())
    now, order = LATE, []
    for _ in range(100):
        order += requests_to(pulls, [made], now)
        for peer in (ANNA, BEN, LAST):
            lacks(pulls, peer)
        now += 0.01
    assert order[:3] == [ANNA, BEN, LAST]
    assert len(order) <= 9
    assert order[3:6] == [ANNA, BEN, LAST]


def test_a_source_that_lacks_it_or_is_lost_is_replaced_at_the_next_tick() -> None:
    _, made = sealed_version(1)
    pulls = Pulls(TUNING, Outbox())
    assert requests_to(pulls, [made], LATE) == [ANNA]
    lacks(pulls, BEN)  # not the source that was asked: ignored
    assert requests_to(pulls, [made], LATE + 0.1) == []
    lacks(pulls, ANNA)
    assert requests_to(pulls, [made], LATE + 0.2) == [BEN]
    pulls.lost(BEN)
    assert requests_to(pulls, [made], LATE + 0.3) == [LAST]


def test_a_chunk_that_its_siblings_have_long_passed_is_pulled_though_they_still_move() -> None:
    """Its stripe is unknown, since its header never came; the other stripes make progress all the time."""
    book, _ = book_with([header(1, 0, stripe=1)])
    made, pulls, now, asked_for = book.versions[version(1)], Pulls(TUNING, Outbox()), 0.0, []
    for seq in range(2, 2 + 3 * PASSED_BY):
        book.header(header(1, seq, stripe=seq % 7), now)
        book.versions[version(1)].fill(made.chunks[seq])
        progress = dict.fromkeys(range(8), now)
        asked_for += [(now, w.seq) for w in tick(pulls, [made], now, progress=progress)]
        now += 3 * TUNING.pull_after_s / (3 * PASSED_BY)
    assert [seq for _, seq in asked_for] == [1]
    assert TUNING.pull_after_s < asked_for[0][0] < 3 * TUNING.pull_after_s


def test_after_losing_a_parent_missing_headers_are_pulled_sooner() -> None:
    book, _ = book_with([header(1, 0, stripe=1)])
    made = book.versions[version(1)]
    for seq in range(2, 2 + 2 * PASSED_BY):
        book.header(header(1, seq, stripe=seq % 7), 0.0)
        made.fill(made.chunks[seq])
    made.fill(made.chunks[0])
    for wait_s, wanted in ((0.3, [1]), (None, [])):
        pulls = Pulls(TUNING, Outbox())
        found: list[int] = []
        for now in (0.0, 0.2, 0.4):
            progress = dict.fromkeys(range(8), now)
            found += [w.seq for w in tick(pulls, [made], now, progress=progress, passed_after_s=wait_s)]
        assert found == wanted


def test_a_chunk_requested_from_a_neighbour_is_not_pulled() -> None:
    book, (chunk,) = book_with([header(1, 0)], held=False)
    pulls = Pulls(TUNING, Outbox())
    made = [book.versions[version(1)]]
    pulls.tick(made, {}, lambda stripe: [ANNA], LATE, {chunk.key})
    assert pulls._outbox.take() == []


def test_a_source_that_brings_pieces_is_given_time() -> None:
    book, (chunk,) = book_with([header(1, 0)], held=False)
    made = book.versions[version(1)]
    pulls = Pulls(TUNING, Outbox())
    assert requests_to(pulls, [made], LATE) == [ANNA]
    book.piece(chunk.key, 0, LATE + 1.5)
    pulls.arrived(chunk, LATE + 1.5)
    assert requests_to(pulls, [made], LATE + TUNING.pull_deadline_s + 0.5) == []
    assert requests_to(pulls, [made], LATE + 1.5 + TUNING.pull_deadline_s) == [BEN]


def test_without_sources() -> None:
    _, made = sealed_version(1)
    assert tick(Pulls(TUNING, Outbox()), [made], LATE, sources=()) == []
