"""A connection that moves between links: every byte once and in order, no link beyond its limit, no early end."""

from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st
from libp2p.io.exceptions import ConnectionClosedError

from swarm.transport.base import PathKind
from swarm.transport.connection.migrating_connection import MigratingConnection, RelayedLink

Pair = tuple[RelayedLink, RelayedLink]


def links(limit_bytes: int = 0, limit_s: float = 0.0) -> Pair:
    near, far = trio.testing.memory_stream_pair()
    return (
        RelayedLink(near, limit_bytes=limit_bytes, limit_s=limit_s),
        RelayedLink(far, limit_bytes=limit_bytes, limit_s=limit_s),
    )


def paths(pair: Pair) -> tuple[MigratingConnection, MigratingConnection]:
    return MigratingConnection(pair[0]), MigratingConnection(pair[1])


async def read_all(path: MigratingConnection) -> bytes:
    data = bytearray()
    while more := await path.read(7):
        data += more
    return bytes(data)


async def go_on(a: MigratingConnection, b: MigratingConnection, pair: Pair) -> None:
    """Move both ends to a new link, `b` a little later, as over a network."""
    a.expect_link()
    b.expect_link()
    await a.continue_on(pair[0])
    await trio.testing.wait_all_tasks_blocked()
    await b.continue_on(pair[1])


@given(st.lists(st.one_of(st.binary(min_size=1, max_size=50), st.just(None)), max_size=20), st.booleans())
async def test_nothing_is_lost_doubled_or_reordered(script: list[bytes | None], swap: bool) -> None:
    """Bytes in both directions, with a new link wherever the script has None."""
    a, b = paths(links())
    expected = b"".join(part for part in script if part)
    got: dict[str, bytes] = {}

    async def listen(name: str, path: MigratingConnection) -> None:
        got[name] = await read_all(path)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen, "a", a)
            nursery.start_soon(listen, "b", b)
            for part in script:
                if part is None:
                    pair = links()
                    await go_on(*((b, a) if swap else (a, b)), (pair[1], pair[0]) if swap else pair)
                else:
                    await a.write(part)
                    await b.write(part)
            await a.link.send_eof()
            await b.link.send_eof()
            a._expected_until_s = b._expected_until_s = 0.0
            a._wake()
            b._wake()
    assert got == {"a": expected, "b": expected}


async def test_a_link_carries_no_more_than_its_limit(autojump_clock: trio.testing.MockClock) -> None:
    """The writer waits for the next link just before the limit, and goes on in the middle of its data."""
    first = links(limit_bytes=101)
    a, b = paths(first)
    got = bytearray()

    async def listen() -> None:
        while len(got) < 150:
            got.extend(await b.read(64))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(listen)
        nursery.start_soon(a.write, bytes(range(150)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(got) == 100
        assert first[0].room() == 0
        await go_on(a, b, links(limit_bytes=101))
    assert bytes(got) == bytes(range(150))


async def test_without_another_link_the_writer_gives_up(autojump_clock: trio.testing.MockClock) -> None:
    a, _ = paths(links(limit_bytes=10))
    with pytest.raises(ConnectionClosedError, match="limit"):
        await a.write(bytes(11))
    assert trio.current_time() < 30


async def test_a_link_is_worn_at_half_its_bytes_in_both_directions(autojump_clock: trio.testing.MockClock) -> None:
    near, far = links(limit_bytes=100)
    with trio.fail_after(1):
        await near.write(bytes(50))
        await near.wait_worn()
        await far.read(64)
        await far.wait_worn()


async def test_a_link_is_worn_before_its_time_is_up(autojump_clock: trio.testing.MockClock) -> None:
    near, _ = links(limit_s=100)
    await near.wait_worn()
    assert 60 <= trio.current_time() <= 80


async def test_an_expected_link_that_never_comes_ends_the_connection(autojump_clock: trio.testing.MockClock) -> None:
    a, b = paths(links())
    b.expect_link()
    await a.close()
    assert await b.read() == b""
    assert 1 < trio.current_time() < 60


async def test_an_end_without_an_expected_link_is_immediate(autojump_clock: trio.testing.MockClock) -> None:
    a, b = paths(links())
    await a.write(b"last")
    await a.close()
    assert (await b.read(), await b.read()) == (b"last", b"")
    assert trio.current_time() == 0


async def test_closing_wakes_reader_and_writer_and_closes_every_link() -> None:
    closed: list[str] = []
    first = links(limit_bytes=2)
    a, b = paths(first)
    a.on_closed = lambda: closed.append("called")
    broken: list[str] = []

    async def fails(name: str, call: Callable, *args) -> None:
        with pytest.raises(ConnectionClosedError):
            await call(*args)
        broken.append(name)

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails, "write", a.write, bytes(2))
            nursery.start_soon(fails, "read", a.read)
            await trio.testing.wait_all_tasks_blocked()
            await a.close()
            await a.close()
        assert await b.read() == b"\0"
        assert await b.read() == b""
        late = links()
        await a.continue_on(late[0])  # after the connection was closed
        assert await late[1].read(1) == b""
    assert sorted(broken) == ["read", "write"]
    assert closed == ["called"]


async def test_early_bytes_are_read_first() -> None:
    near, far = links()
    await far.write(b"rest")
    path = MigratingConnection(near, b"\x13")
    assert (await path.read(), await path.read()) == (b"\x13", b"rest")
    assert path.path_kind is PathKind.CIRCUIT
