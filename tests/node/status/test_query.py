"""Status over a real Unix socket."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from codec.errors import UsageError
from node.status import query
from swarm.transport.base import Unreachable


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q") as folder:  # short: a socket's path has 107 bytes
        yield Path(folder)


async def test_each_question_gets_the_state_of_that_moment(home: Path) -> None:
    count = 0

    def state() -> dict:
        nonlocal count
        count += 1
        return {"head": [0, count]}

    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, state)
        for expected in (1, 2):
            assert await trio.to_thread.run_sync(query.ask, home) == {"head": [0, expected]}
        nursery.cancel_scope.cancel()


def test_nobody_there(home: Path) -> None:
    with pytest.raises(Unreachable, match="swarm-node seed"):
        query.ask(home)


async def test_one_process_a_home(home: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, dict)
        with pytest.raises(UsageError, match="Another process"):
            await query.serve(home, dict)
        nursery.cancel_scope.cancel()
