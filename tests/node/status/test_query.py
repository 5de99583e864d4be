"""Status over a real Unix socket."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from codec.errors import UsageError
from node.status import query
from node.status.schema import NodeStatus, OwnStatus, SeedStatus, Status
from swarm.transport.base import Unreachable


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q") as folder:  # short: a socket's path has 107 bytes
        yield Path(folder)


async def test_each_question_gets_the_status_of_that_moment(home: Path) -> None:
    answers: Iterator[Status] = iter([SeedStatus(head=(0, 1)), NodeStatus(nodes=[OwnStatus(held=(0, 2))])])
    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, lambda: next(answers))
        assert await trio.to_thread.run_sync(query.ask, home) == SeedStatus(head=(0, 1))
        assert await trio.to_thread.run_sync(query.ask, home) == NodeStatus(nodes=[OwnStatus(held=(0, 2))])
        nursery.cancel_scope.cancel()


def test_no_process_answers(home: Path) -> None:
    with pytest.raises(Unreachable, match="swarm-node seed"):
        query.ask(home)


async def test_one_process_serves_a_home(home: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, SeedStatus)
        with pytest.raises(UsageError, match="Another process"):
            await query.serve(home, SeedStatus)
        nursery.cancel_scope.cancel()
