"""Uploads: what is answered to requests for chunks, and how much at a time."""

import pytest
from protocol_kit import TUNING, admit, book_with, header, key_of, meet, new_peer, only, say, sends

from swarm.protocol.core.events import Effect, HeaderStored, PeerDown, PieceStored, SendDone, SendHeader, SendPiece
from swarm.protocol.core.outbox import Outbox
from swarm.protocol.core.wire import LacksChunk, WantChunk
from swarm.protocol.member import Peer
from swarm.protocol.transfer.chunks import NO_PIECES
from swarm.protocol.transfer.exchange import Exchange
from swarm.protocol.transfer.repair.uploads import Uploads

ANNA = key_of("anna").public


def giver() -> Peer:
    peer = new_peer(0)
    admit(peer)
    meet(peer, 1)
    for seq in range(40):
        event = header(1, seq)
        peer.apply(HeaderStored(None, None, event.key, event.chunk_id, event.parent_root, event.piece_bytes, 100), 0.0)
        for index in range(4):
            peer.apply(PieceStored(None, None, event.key, index), 0.0)
    return peer


def want(seq: int, pieces: bytes = b"", attempt: int = 0) -> WantChunk:
    return WantChunk(0, 1, attempt, seq, pieces)


def frames(effects: list[Effect]) -> list[int]:
    return [e.index if isinstance(e, SendPiece) else -1 for e in only(effects, SendHeader) + only(effects, SendPiece)]


def test_a_pull_is_answered_with_the_header_and_the_pieces_asked_for() -> None:
    assert frames(say(giver(), 1, want(0, b"\x05"))) == [-1, 0, 2]


@pytest.mark.parametrize("message", [want(99), want(0, attempt=1), want(0, b"\xf0")])
def test_a_pull_of_a_missing_chunk_is_answered_with_lacks(message: WantChunk) -> None:
    effects = say(giver(), 1, message)
    assert frames(effects) == []
    assert len(sends(effects, LacksChunk, to=1)) == 1


def test_a_header_is_given_alone() -> None:
    """To a member that does not know yet whether it needs the pieces."""
    peer = giver()
    assert frames(say(peer, 1, want(0, NO_PIECES))) == [-1]
    assert say(peer, 1, want(0, NO_PIECES)) == []
    peer.apply(SendDone(key_of(1).public, 0, header(1, 0).key, -1, pull=True), 0.0)
    assert len(frames(say(peer, 1, want(0)))) == 5


def test_a_chunk_that_is_being_sent_is_not_sent_again() -> None:
    peer = giver()
    assert len(frames(say(peer, 1, want(0)))) == 5
    assert say(peer, 1, want(0)) == []
    for index in range(-1, 4):
        peer.apply(SendDone(key_of(1).public, 0, header(1, 0).key, index, pull=True), 0.0)
    assert len(frames(say(peer, 1, want(0)))) == 5


def test_a_flood_of_pulls_queues_a_bounded_amount() -> None:
    peer = giver()
    flood = [effect for seq in range(40) for effect in say(peer, 1, want(seq))]
    assert len(only(flood, SendHeader)) == 2 * TUNING.pulls_in_flight
    assert len(sends(flood, LacksChunk)) == 40 - 2 * TUNING.pulls_in_flight
    peer.apply(PeerDown(key_of(1).public), 0.0)
    meet(peer, 1)
    assert len(frames(say(peer, 1, want(39)))) == 5


def test_uploads_forget_a_peer_that_is_gone() -> None:
    book, _ = book_with([])
    uploads = Uploads(TUNING, Outbox(), book, Exchange(book, TUNING, Outbox()))
    uploads.begin(ANNA, header(1, 0).key, 2)
    uploads.lost(ANNA)
    uploads.sent(ANNA, header(1, 0).key)
    assert not uploads.busy(ANNA, header(1, 0).key)
