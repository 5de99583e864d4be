"""Sleep and wake over a node's real socket."""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from codec.errors import UsageError
from node.status import query
from node.status.schema import NodeStatus
from node.status.sleeping import MAX_WITHIN_S, NodeAway, Rested, Sleep, Wake, sleep_engines, wake_engines
from node.trainers import shared_gpu
from node.trainers.errors import SwarmDown, SwarmTimeout


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="q") as folder:  # short: a socket's path has 107 bytes
        yield Path(folder)


async def test_a_node_is_told_and_answers(home: Path) -> None:
    heard: list[Sleep | Wake] = []

    async def rest(request: Sleep | Wake) -> Rested:
        heard.append(request)
        await trio.sleep(0.01)
        return Rested(isinstance(request, Sleep))

    async with trio.open_nursery() as nursery:
        await nursery.start(partial(query.serve, rest=rest), home, NodeStatus)
        assert await trio.to_thread.run_sync(sleep_engines, home, 5.0) is True
        assert await trio.to_thread.run_sync(wake_engines, home, 7.0) is False
        assert heard == [Sleep(5.0), Wake(7.0)]
        assert await trio.to_thread.run_sync(query.ask, home) == NodeStatus(), "status is answered as ever"
        assert await trio.to_thread.run_sync(shared_gpu.sleep, home, 5.0) is True
        with pytest.raises(SwarmTimeout, match="none was ready within 7 s"):
            await trio.to_thread.run_sync(shared_gpu.wake, home, 7.0)
        nursery.cancel_scope.cancel()


async def test_a_process_without_engines_says_so(home: Path) -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(query.serve, home, NodeStatus)
        with pytest.raises(UsageError, match="There is no engine here"):
            await trio.to_thread.run_sync(sleep_engines, home, 5.0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("within_s", [-1.0, MAX_WITHIN_S + 1, float("nan")])
def test_an_impossible_time_is_refused(home: Path, within_s: float) -> None:
    for ask in (sleep_engines, wake_engines):
        with pytest.raises(UsageError, match="from 0 to 86400 seconds"):
            ask(home, within_s)


def test_without_a_node_the_error_says_what_to_name(home: Path) -> None:
    with pytest.raises(NodeAway, match="Name the home of the node"):
        sleep_engines(home, 1.0)
    with pytest.raises(SwarmDown, match="Name the home of the node"):
        shared_gpu.wake(home, 1.0)
