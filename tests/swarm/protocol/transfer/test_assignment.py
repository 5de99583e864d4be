"""Assignment: each chunk goes to one stripe whose root child has credit."""

from protocol_kit import TUNING, book_with, fresh, header, key_of

from swarm.protocol.core.events import Ready, SendHeader, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import Attach, Credit
from swarm.protocol.transfer.assignment import ChunkAssigner
from swarm.protocol.transfer.chunks import Chunk, Chunks
from swarm.protocol.transfer.exchange import Exchange

FAST, SLOW, STRANGER = (key_of(name).public for name in ("fast", "slow", "stranger"))
CHUNK_BYTES = 4100


def assigner_with(chunks: int) -> tuple[ChunkAssigner, Exchange, Chunks, list[Chunk]]:
    book, made = book_with([header(1, seq, stripe=None) for seq in range(chunks)])
    exchange = Exchange(book, TUNING, Outbox())
    assigner = ChunkAssigner(exchange, book, lambda stripe, peer: peer != STRANGER)
    for chunk in made:
        assigner.add(chunk)
    return assigner, exchange, book, made


def test_nothing_is_assigned_without_credit() -> None:
    assigner, exchange, _, made = assigner_with(3)
    effects = fresh(exchange)
    assigner.assign(0.0)
    exchange.attached(FAST, Attach(0, 0, 0, 0, ()), 0.0)
    assigner.assign(0.0)
    assert effects == [Ready(FAST)]
    assert len(assigner) == 3
    assert all(chunk.stripe is None for chunk in made)


def test_each_chunk_is_sent_to_one_stripe_in_order() -> None:
    assigner, exchange, _, made = assigner_with(8)
    effects = fresh(exchange)
    for stripe in range(4):
        exchange.attached(FAST, Attach(stripe, 0, 0, 1 << 30, ()), 0.0)
    assigner.assign(0.0)
    assert [e.key.seq for e in effects if isinstance(e, SendHeader)] == list(range(8))
    assert len([e for e in effects if isinstance(e, SendPiece)]) == 8 * 4
    assert sorted(chunk.stripe or 0 for chunk in made) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_branch_that_drains_faster_is_assigned_more() -> None:
    assigner, exchange, _, made = assigner_with(100)
    exchange.attached(FAST, Attach(0, 0, 0, CHUNK_BYTES, ()), 0.0)
    exchange.attached(SLOW, Attach(1, 0, 0, CHUNK_BYTES, ()), 0.0)
    for turn in range(1, 40):
        assigner.assign(0.0)
        exchange.credited(FAST, Credit(0, CHUNK_BYTES * (1 + turn)), 0.0)
        exchange.credited(SLOW, Credit(1, CHUNK_BYTES * (1 + turn // 4)), 0.0)
    assigned = [chunk.stripe for chunk in made if chunk.stripe is not None]
    assert 3 * assigned.count(1) < assigned.count(0)
    assert assigned.count(1) >= 5


def test_a_child_that_is_not_a_root_child_attracts_no_chunks() -> None:
    assigner, exchange, _, made = assigner_with(4)
    exchange.attached(FAST, Attach(0, 0, 0, 2 * CHUNK_BYTES, ()), 0.0)
    for stripe in range(1, 64):
        exchange.attached(STRANGER, Attach(stripe, 0, 0, (1 << 63) - 1, ()), 0.0)
    assigner.assign(0.0)
    assert [chunk.stripe for chunk in made] == [0, 0, None, None]


def test_without_root_children_any_child_counts() -> None:
    assigner, exchange, _, made = assigner_with(1)
    exchange.attached(STRANGER, Attach(5, 0, 0, 1 << 30, ()), 0.0)
    assigner.assign(0.0)
    assert made[0].stripe == 5


def test_a_root_child_that_lags_is_assigned_nothing() -> None:
    assigner, exchange, _, made = assigner_with(2)
    exchange.attached(SLOW, Attach(0, 0, 0, 1 << 30, ()), 0.0)
    exchange.attached(FAST, Attach(1, 0, 0, 1000, ()), 0.0)
    exchange.children[0][SLOW].lagging = True
    assigner.assign(0.0)
    assert [chunk.stripe for chunk in made] == [1, None]


def test_an_abandoned_attempt_is_not_assigned() -> None:
    assigner, exchange, _, _ = assigner_with(3)
    assigner.forget((0, 1, 1))
    assert len(assigner) == 3
    assigner.forget((0, 1, 0))
    exchange.attached(FAST, Attach(0, 0, 0, 1 << 30, ()), 0.0)
    effects = fresh(exchange)
    assigner.assign(0.0)
    assert effects == []


def test_chunks_of_a_replaced_attempt_are_not_assigned() -> None:
    assigner, exchange, book, made = assigner_with(3)
    taken = book.header(header(1, 0, attempt=1, stripe=None), 0.0)
    assert taken is not None
    assigner.add(taken[0])
    exchange.attached(FAST, Attach(0, 0, 0, 1 << 30, ()), 0.0)
    effects = fresh(exchange)
    assigner.assign(0.0)
    assert {e.key.attempt for e in effects if isinstance(e, SendHeader)} == {1}
    assert made[0].stripe is None


def test_pruning_removes_dropped_versions() -> None:
    assigner, _, book, _ = assigner_with(3)
    assigner.prune()
    assert len(assigner) == 3
    book.drop(next(iter(book.versions)))
    assigner.prune()
    assert len(assigner) == 0
