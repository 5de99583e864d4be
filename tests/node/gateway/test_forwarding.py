"""What a client of a front gets while its answer comes slowly, by a virtual clock and a link that the test plays."""

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from node.gateway.front.forwarding import QUIET_S, Forwarding
from node.gateway.front.messages import Answer, Ask, End, Part
from node.gateway.front.seeds import Seeds
from node.http.memory_budget import MemoryBudget
from node.http.messages import Request, RequestHead

Found = Answer | Part | End
EVENTS = "text/event-stream"


class PlayedLink:
    """Implements what `Forwarding` uses of a `SeedLink`."""

    def __init__(self) -> None:
        self.answer, self._found = trio.open_memory_channel[Found](math.inf)

    def ask(
        self, request: Callable[[int], Ask], taken: Callable[[], None]
    ) -> tuple[int, "trio.MemoryReceiveChannel[Found]"]:
        request(1)
        return 1, self._found

    def delivered(self, number: int, count: int) -> None: ...

    def forget(self, number: int) -> None: ...


@asynccontextmanager
async def forwarded(content_type: str, within_s: float) -> AsyncIterator[tuple[PlayedLink, list[tuple[float, bytes]]]]:
    """Yields the link, and the list of what the client got, each with the second that it came in. The answer has begun,
    and is all sent when the block ends."""
    link, seeds, got = PlayedLink(), Seeds(), []
    seeds.set(link)  # pyright: ignore[reportArgumentType]
    head = RequestHead("POST", "/v1/completions", "", {}, 0)
    request = Request(head, bytearray(), MemoryBudget())
    forwarding = Forwarding(request, seeds, MemoryBudget(), keep=True, away_s=60.0, within_s=within_s)
    link.answer.send_nowait(Answer(1, 200, content_type, []))
    began = trio.current_time()
    response = await forwarding.answer()
    assert not isinstance(response.body, bytes)

    async def send(data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        got.append((round(trio.current_time() - began, 3), data))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(response.body, send)
        yield link, got
    request.until_sent.close()


async def test_a_quiet_stream_has_a_comment_now_and_then_and_goes_on(autojump_clock) -> None:
    async with forwarded(EVENTS, within_s=1000.0) as (link, got):
        link.answer.send_nowait(Part(1, b"a", b""))
        await trio.sleep(2.5 * QUIET_S)
        link.answer.send_nowait(Part(1, b"b", b""))
        await trio.sleep(0.5 * QUIET_S)
        link.answer.send_nowait(Part(1, b"c", b""))  # what came before counts from its own time
        link.answer.send_nowait(End(1, whole=True))
    waiting = b": waiting\n\n"
    assert got == [(0.0, b"a"), (QUIET_S, waiting), (2 * QUIET_S, waiting), (2.5 * QUIET_S, b"b"), (3 * QUIET_S, b"c")]


async def test_an_answer_that_is_not_json_events_has_no_comments(autojump_clock) -> None:
    async with forwarded("application/json", within_s=1000.0) as (link, got):
        await trio.sleep(3.5 * QUIET_S)
        link.answer.send_nowait(Part(1, b"{}", b""))
        link.answer.send_nowait(End(1, whole=True))
    assert got == [(3.5 * QUIET_S, b"{}")]


async def test_a_stream_that_takes_too_long_ends_with_an_error(autojump_clock) -> None:
    """Also one that is never quiet."""
    async with forwarded(EVENTS, within_s=20.0) as (link, got):
        for _ in range(30):
            link.answer.send_nowait(Part(1, b"a", b""))
            await trio.sleep(1.0)
    assert [at for at, _ in got[-2:]] == [19.0, 20.0]
    assert b"has not finished this in time" in got[-1][1]
