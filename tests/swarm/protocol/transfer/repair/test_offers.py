"""Offers: idle uplink goes to the oldest want that can be granted, a few chunks at a time."""

import random

import pytest
from protocol_kit import SWARM, TUNING, header, key_of

from codec import ChunkKey
from swarm.protocol.core.events import Send
from swarm.protocol.core.wire import Attach, LateChunkWants, Offer
from swarm.protocol.state import OwnUplink, State
from swarm.protocol.transfer.repair.load_shedding import LATE_WANTS_HOLD_S
from swarm.protocol.transfer.repair.offers import ANSWER_S, AT_ONCE, AT_ONCE_S, LOOK_AGAIN_S, Offers

ANNA, BEN, CLEO = (key_of(name).public for name in ("anna", "ben", "cleo"))


def key_of_chunk(seq: int) -> ChunkKey:
    return ChunkKey(0, 1, 0, seq)


def wants(*seqs: int) -> LateChunkWants:
    return LateChunkWants(0, 1, 0, seqs)


UP_BYTES_S = 25e6
CHUNK_BYTES = sum(header(1, 0).piece_bytes)


class Giver:
    """A member that holds these chunks, and no others."""

    def __init__(self, *whole: int, up_bytes_s: float = UP_BYTES_S) -> None:
        self.up_bytes_s = up_bytes_s
        uplink = OwnUplink(bytes_s=lambda: self.up_bytes_s)
        self.state = State.new(key_of("giver"), SWARM, TUNING, random.Random(0), uplink)
        for seq in whole:
            self.add_chunk(seq)
        self.offers = Offers(self.state)

    def add_chunk(self, seq: int, pieces: int = 4) -> None:
        self.state.chunks.header(header(1, seq), 0.0)
        for index in range(pieces):
            self.state.chunks.piece(key_of_chunk(seq), index, 0.0)

    def receive_wants(self, peer: bytes, message: LateChunkWants, now: float = 0.0) -> list[tuple[bytes, Offer]]:
        self.offers.heard(peer, message, now)
        return self.sent_offers()

    def look(self, now: float) -> list[tuple[bytes, Offer]]:
        self.offers.look(now)
        return self.sent_offers()

    def sent_offers(self) -> list[tuple[bytes, Offer]]:
        effects = self.state.outbox.take()
        return [(e.peer, e.message) for e in effects if isinstance(e, Send) and isinstance(e.message, Offer)]


def test_complete_chunks_are_offered_in_the_order_of_the_list() -> None:
    giver = Giver(1, 2)
    giver.add_chunk(0, pieces=3)
    assert giver.receive_wants(ANNA, wants(2, 0, 1)) == [(ANNA, Offer(*key_of_chunk(2)))]


def test_the_oldest_want_comes_first() -> None:
    giver = Giver(*range(8))
    giver.state.uploads.begin(CLEO, key_of_chunk(7), 1)
    giver.state.uploads.begin(CLEO, key_of_chunk(6), 1)
    assert giver.receive_wants(ANNA, wants(5, 4)) == giver.receive_wants(BEN, wants(2, 1)) == [], (
        "it already gives as many as it may"
    )
    giver.state.uploads.sent(CLEO, key_of_chunk(7))
    assert giver.look(0.0) == [(BEN, Offer(*key_of_chunk(2)))]


def test_few_chunks_are_given_at_a_time_and_one_to_each() -> None:
    giver = Giver(*range(8))
    assert giver.receive_wants(ANNA, wants(0, 1)) == [(ANNA, Offer(*key_of_chunk(0)))]
    assert giver.look(LOOK_AGAIN_S) == []
    assert giver.receive_wants(BEN, wants(2)) == [(BEN, Offer(*key_of_chunk(2)))]
    assert AT_ONCE == 2
    assert giver.receive_wants(CLEO, wants(3)) == []
    giver.offers.taken(ANNA, key_of_chunk(0))
    giver.state.uploads.begin(ANNA, key_of_chunk(0), 1)
    assert giver.look(LOOK_AGAIN_S) == [], "chunks on their way count like offers"
    giver.state.uploads.sent(ANNA, key_of_chunk(0))
    assert giver.look(2 * LOOK_AGAIN_S) == [(ANNA, Offer(*key_of_chunk(1)))], "an accepted offer is not repeated"


def test_an_offer_expires_without_want_or_answer() -> None:
    giver = Giver(0, 1)
    giver.receive_wants(ANNA, wants(0))
    assert giver.receive_wants(ANNA, wants(1)) == [(ANNA, Offer(*key_of_chunk(1)))]
    assert giver.look(ANSWER_S / 2) == []
    assert giver.look(ANSWER_S) == [(ANNA, Offer(*key_of_chunk(1)))]


def test_wants_expire_are_withdrawn_and_end_with_their_session() -> None:
    giver = Giver()
    giver.receive_wants(ANNA, wants(0))
    giver.receive_wants(BEN, wants(0))
    giver.receive_wants(CLEO, wants(0))
    giver.receive_wants(BEN, LateChunkWants(0, 0, 0, ()))
    giver.offers.lost(CLEO)
    giver.add_chunk(0)
    assert giver.look(LOOK_AGAIN_S) == [(ANNA, Offer(*key_of_chunk(0)))]
    assert giver.look(LATE_WANTS_HOLD_S + ANSWER_S) == []


def test_a_child_is_not_offered_chunks_that_are_pushed_to_it() -> None:
    giver = Giver(0)
    giver.state.exchange.attached(ANNA, Attach(0, 0, 0, 0, ()), 0.0)
    assert giver.receive_wants(ANNA, wants(0)) == []
    assert giver.receive_wants(BEN, wants(0)) == [(BEN, Offer(*key_of_chunk(0)))]


@pytest.mark.parametrize("why", ["its own children wait", "it may give nothing today"])
def test_a_member_without_spare_uplink_offers_nothing(why: str) -> None:
    giver = Giver(0)
    if why.startswith("its own"):
        giver.state.exchange.attached(BEN, Attach(0, 0, 0, 0, ()), 0.0)
        for seq in range(1, 101):
            size = int(TUNING.idle_s * UP_BYTES_S / 100) + 1
            giver.state.chunks.header(header(1, seq, pieces=1, piece_bytes=size), 0.0)
            chunk = giver.state.chunks.find(key_of_chunk(seq))
            assert chunk is not None
            giver.state.exchange.push(chunk, 0, None, 0.0)
    else:
        giver.state.exchange.give(False, 0.0)
    assert giver.receive_wants(ANNA, wants(0)) == []


@pytest.mark.parametrize(("carries_s", "given"), [(0.8 * AT_ONCE_S, 2), (1.2 * AT_ONCE_S, 1), (5.0, 1)])
def test_a_slow_uplink_promises_one_chunk_at_a_time(carries_s: float, given: int) -> None:
    giver = Giver(0, 1, up_bytes_s=2 * CHUNK_BYTES / carries_s)
    assert len(giver.receive_wants(ANNA, wants(0)) + giver.receive_wants(BEN, wants(1))) == given


def test_a_slow_uplink_offers_with_less_queued() -> None:
    giver = Giver(0, 1)
    giver.state.exchange.attached(BEN, Attach(0, 0, 0, 0, ()), 0.0)
    chunk = giver.state.chunks.find(key_of_chunk(1))
    assert chunk is not None
    giver.state.exchange.push(chunk, 0, None, 0.0)
    waits = giver.state.exchange.waiting_bytes
    assert waits > 0
    giver.up_bytes_s = 0.9 * waits / TUNING.idle_s
    assert giver.receive_wants(ANNA, wants(0)) == []
    giver.up_bytes_s = 1.1 * waits / TUNING.idle_s
    assert giver.look(LOOK_AGAIN_S) == [(ANNA, Offer(*key_of_chunk(0)))]


def test_a_member_outside_the_plan_offers_nothing() -> None:
    assert Giver(0, up_bytes_s=0.0).receive_wants(ANNA, wants(0)) == []
