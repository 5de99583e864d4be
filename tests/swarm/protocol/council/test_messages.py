"""The council's messages as they travel."""

import msgspec
import pytest

from codec.errors import PeerError
from swarm.protocol.council.messages import (
    START,
    Ack,
    Append,
    AskHeld,
    AskKept,
    AskVote,
    Entry,
    HandOver,
    Held,
    KeptHead,
    LacksKept,
    Position,
    Release,
    SnapshotHead,
    Vote,
    decode,
    encode,
)

MESSAGES = [
    Append(3, 1.5, Position(2, 7), (Entry(3, 8, b"body"), Entry(3, 9, b""))),
    Ack(3, 1.5, Position(3, 9), True),
    AskVote(4, START, True),
    Vote(4, True, False),
    Release(4, b"A" * 32),
    HandOver(4),
    AskHeld(4, b"manifest"),
    Held(4, bytes(32)),
    SnapshotHead(4, Position(2, 7), 1),
    AskKept(4, "optimizer", bytes(32), 0),
    LacksKept(4, bytes(32)),
    KeptHead(4, "optimizer", bytes(32), 7),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message) -> None:
    found = decode(encode(message))
    assert found == message
    assert type(found) is type(message)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00", encode(MESSAGES[0])[:-1], msgspec.msgpack.encode((9, 1)), msgspec.msgpack.encode((6, -1)),
        msgspec.msgpack.encode((2, 1, float("nan"), (1, 1), False)), msgspec.msgpack.encode((2, 1, 0.0, (1,), False)),
    ],
)  # fmt: skip
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(PeerError):
        decode(data)
