"""How many sequences a node generates and holds, by what its engine says of itself."""

from dataclasses import dataclass
from typing import Any, cast

import pytest

from node.engines.room import NO_ROOM_TOLD, Room, together
from node.ledger.messages import MAX_CAPACITY
from node.member.batch import Batch
from node.member.pace import Pace

PACE = Pace(batch=32, capacity=64)


@dataclass
class Saying:
    room: Room
    continuous_batching: bool = True


def batch_of(room: Room, *lengths: int, continuous: bool = True, engines: int = 1) -> Batch:
    batch = Batch(cast(Any, Saying(room, continuous)), PACE)
    batch.engines = engines
    for length in lengths:
        batch.note_finished(length)
    return batch


@pytest.mark.parametrize(
    ("room", "lengths", "generated"),
    [
        (NO_ROOM_TOLD, (100,), 32),
        (Room(256, 0), (100,), 32),
        (Room(256, 100_000), (), 32),
        (Room(256, 100_000), (1000,), 100),
        (Room(256, 100_000), (1500, 500), 100),
        (Room(256, 100_000), (100,), 256),
        (Room(256, 1000), (1000,), 32),
        (Room(16, 100_000), (), 16),
        (Room(16, 100_000), (100,), 16),
        (Room(1 << 40, 1 << 47), (1,), MAX_CAPACITY),
    ],
)
def test_an_engine_gets_what_it_has_room_for(room: Room, lengths: tuple[int, ...], generated: int) -> None:
    assert batch_of(room, *lengths).generated == generated


def test_an_engine_without_continuous_batching_gets_the_usual_batch() -> None:
    batch = batch_of(Room(256, 100_000), 100, continuous=False)
    assert (batch.generated, batch.held) == (32, 64)


def test_the_usual_batch_is_of_each_engine() -> None:
    assert batch_of(NO_ROOM_TOLD, engines=3).generated == 96
    assert batch_of(Room(512, 200_000), engines=2).generated == 64


def test_one_group_is_held_in_reserve() -> None:
    batch = batch_of(Room(256, 100_000), 100)
    assert batch.held == 256 + 64
    batch.note_lease(128)
    assert batch.held == 256 + 128
    batch.note_lease(1024)
    assert batch.held == 2 * 256, "not more than twice what is generated"


def test_the_length_is_that_of_the_last_sequences() -> None:
    batch = batch_of(Room(1024, 100_000), *[1000] * 100, *[100] * 640)
    assert 900 < batch.generated <= 1000


def test_what_one_server_does_not_say_is_not_known_of_all() -> None:
    assert together([Room(4, 100), Room(8, 50)]) == Room(12, 150)
    assert together([Room(4, 100), NO_ROOM_TOLD]) == NO_ROOM_TOLD
    assert together([Room(4, 100), Room(8, 0)]) == Room(12, 0)
    assert together([]) == NO_ROOM_TOLD
