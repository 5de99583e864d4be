"""Tasks of py-libp2p's network: what it costs to start one, and what an error in one ends."""

import pytest
import trio
import trio.testing
from libp2p.tools.anyio_service.trio_manager import TrioManager
from libp2p_kit import echo, transport, two

from swarm import guard
from swarm.guard import Source
from swarm.transport.base import Lane, Unreachable
from swarm.transport.tasks import GuardedTasks


async def test_a_connection_looks_through_no_tasks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's manager would, for each task that it starts."""
    async with two() as (_, b, addrs):
        searches = 0

        def counted(self: TrioManager, task: trio.lowlevel.Task) -> None:
            nonlocal searches
            searches += 1

        monkeypatch.setattr(TrioManager, "_find_parent_task", counted)
        async with trio.open_nursery() as nursery:
            other = transport(3)
            await nursery.start(other.serve, echo)
            begun = searches  # the two that run the service of `other`
            await other.connect(b.key, addrs)
            async with await other.open_stream(b.key, Lane.CONTROL) as stream:
                await stream.send_all(b"hello")
                assert await stream.receive_some() == b"hello"
            assert searches == begun
            nursery.cancel_scope.cancel()


async def test_an_error_in_one_task_ends_no_other_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_STRICT", raising=False)

    async def fails() -> None:
        raise ArithmeticError("a bug")

    async with two() as (a, b, _):
        before = guard.bugs[Source.CONNECTION]
        assert b.host is not None
        b.host.get_network().manager.run_task(fails)  # type: ignore[attr-defined]
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert guard.bugs[Source.CONNECTION] == before + 1
        async with await a.open_stream(b.key, Lane.CONTROL) as stream:
            await stream.send_all(b"hello")
            assert await stream.receive_some() == b"hello"


async def test_a_service_that_has_ended_starts_nothing() -> None:
    async with trio.open_nursery() as nursery:
        tasks = GuardedTasks(None, nursery, Source.CONNECTION)
    with pytest.raises(Unreachable, match="does not serve any more"):
        tasks.run_task(trio.sleep_forever)
