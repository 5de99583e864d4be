"""The connection of a front to a seed: what waits to be sent, and what the seed has not read, counts."""

import contextlib
import socket
from collections.abc import AsyncIterator

import trio
import trio.testing

from node.gateway.front.messages import Ask, Over, Taken, ToFront, ToSeed
from node.gateway.front.seed_link import SeedLink
from node.ipc.async_channel import AsyncChannel


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[SeedLink, AsyncChannel]]:
    """A front's link, and the seed's end of it."""
    ours, theirs = socket.socketpair()
    async with trio.open_nursery() as nursery:
        link, seed = SeedLink(ours), AsyncChannel.adopt(theirs, ToSeed)
        nursery.start_soon(link.run)
        yield link, seed
        seed.close()
        nursery.cancel_scope.cancel()


def asked(number: int, count: int = 1) -> Ask:
    return Ask(number, "POST", "/v1/completions", "", {}, b"x" * count)


async def test_a_body_counts_until_the_seed_has_read_it() -> None:
    taken: list[str] = []
    async with linked() as (link, seed):
        number, found = link.ask(asked, lambda: taken.append("body"))
        assert (await seed.recv())[0].messages == [asked(number)]
        await trio.testing.wait_all_tasks_blocked()
        assert taken == []
        await seed.send(ToFront([Taken(number)]))
        await trio.testing.wait_all_tasks_blocked()
        assert taken == ["body"]
        assert found.statistics().current_buffer_used == 0, "it is no part of the answer"


async def test_a_request_that_is_over_before_it_is_sent_is_not_sent() -> None:
    async with linked() as (link, seed):
        first, _ = link.ask(lambda number: asked(number, 8 << 20), lambda: None)
        await trio.testing.wait_all_tasks_blocked()  # the socket takes no more
        second, _ = link.ask(asked, lambda: None)
        link.forget(second)
        third, _ = link.ask(asked, lambda: None)
        link.forget(first)
        got = [message for _ in range(2) for message in (await seed.recv())[0].messages]
        assert [(type(message), message.id) for message in got] == [(Ask, first), (Ask, third), (Over, first)]
