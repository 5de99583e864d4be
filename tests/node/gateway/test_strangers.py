"""Clients without the key, and clients that occupy memory: how much each may cost the gateway."""

import json
from pathlib import Path

import pytest
import trio
from gateway_kit import gateway, raw

from node.http import HttpLimits, Request, Response, json_response, memory_budget, serve, strangers
from node.http.memory_budget import BudgetFull, MemoryBudget
from node.http.strangers import MOST, MOST_OF_ONE, YOUNG_S, Strangers, address_of

BODY = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()


def head(length: int, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def host_and_port(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


async def test_without_the_key_nothing_of_a_body_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reserved: list[int] = []

    async def reserve(self: MemoryBudget, count: int) -> None:
        reserved.append(count)

    monkeypatch.setattr(memory_budget.MemoryBudget, "reserve", reserve)
    monkeypatch.setattr(memory_budget.MemoryBudget, "give_back", lambda self, count: None)
    async with gateway(tmp_path, api_key="sesame") as (swarm, url):
        await swarm.add(1)
        for wrong in ((), ("Authorization: Bearer open",), ("Authorization: Bearer s\xe9same",)):
            answer_bytes = await raw(url, head(8 << 20, *wrong))  # and no byte of the body
            assert answer_bytes.startswith(b"HTTP/1.1 401 ")
            assert b"connection: close" in answer_bytes.lower()
        answer_bytes = await raw(url, head(8 << 20, "Expect: 100-continue"))
        assert answer_bytes.startswith(b"HTTP/1.1 401 "), "the client gets no 100 Continue"
        assert reserved == []
        answer_bytes = await raw(url, head(len(BODY), "Authorization: Bearer sesame") + BODY)
        assert b'"text":"cba"' in answer_bytes
        assert reserved[0] == len(BODY)  # reads the answer


async def test_a_client_with_the_key_gets_100_continue(tmp_path: Path):
    async with gateway(tmp_path, api_key="sesame") as (swarm, url):
        await swarm.add(1)
        async with await trio.open_tcp_stream(*host_and_port(url)) as stream:
            await stream.send_all(head(len(BODY), "Authorization: Bearer sesame", "Expect: 100-continue"))
            with trio.fail_after(5):
                assert (await stream.receive_some(4096)).startswith(b"HTTP/1.1 100 ")
                await stream.send_all(BODY)
                assert b'"text":"cba"' in await stream.receive_some(65536)


async def count(request: Request) -> Response:
    return json_response({"bytes": len(request.body)})


async def test_a_body_below_the_minimum_rate_is_given_up(autojump_clock):
    """The memory is needed for others. A body that arrives at a quarter of a megabit per second is accepted."""
    limits = HttpLimits(grace_s=5.0, body_s=60.0)
    length = 600_000  # 18 s at the minimum rate
    async with trio.open_nursery() as nursery:
        port = await nursery.start(lambda task_status: serve(count, "127.0.0.1", 0, limits, task_status=task_status))
        autojump_clock.autojump_threshold = 0.05
        for part, wanted in ((1000, b" 408 "), (40_000, b" 200 ")):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                began = trio.current_time()
                await stream.send_all(head(length))

                async def trickle(stream=stream, part=part) -> None:
                    for at in range(0, length, part):
                        await trio.sleep(1.0)
                        await stream.send_all(b"x" * min(part, length - at))

                async with trio.open_nursery() as inner:
                    inner.start_soon(trickle)
                    answer_bytes = await stream.receive_some(65536)
                    inner.cancel_scope.cancel()
                assert wanted in answer_bytes, answer_bytes
                if wanted == b" 408 ":
                    assert trio.current_time() - began < 7.0
        nursery.cancel_scope.cancel()


async def test_the_bodies_of_all_clients_are_bounded_together(autojump_clock):
    """Three bodies are announced and two fit: the third gets 429, until one of the others is done."""
    limits = HttpLimits(body_bytes=memory_budget.MOST_BYTES // 2)
    async with trio.open_nursery() as nursery:
        port = await nursery.start(lambda task_status: serve(count, "127.0.0.1", 0, limits, task_status=task_status))
        autojump_clock.autojump_threshold = 0.05
        streams = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        for stream in streams[:2]:
            await stream.send_all(head(limits.body_bytes))
        await trio.sleep(0.2)
        await streams[2].send_all(head(limits.body_bytes))
        answer_bytes = await streams[2].receive_some(65536)
        assert b" 429 " in answer_bytes
        assert b"retry-after" in answer_bytes.lower()
        await streams[0].aclose()
        async with await trio.open_tcp_stream("127.0.0.1", port) as again:
            await again.send_all(head(4) + b"{..}")
            assert b'{"bytes":4}' in await again.receive_some(65536)
        for stream in streams[1:]:
            await stream.aclose()
        nursery.cancel_scope.cancel()


async def test_reserve_waits_for_room(autojump_clock):
    room = MemoryBudget(100)
    await room.reserve(80)
    with pytest.raises(BudgetFull):
        await room.reserve(30)
    assert trio.current_time() == pytest.approx(memory_budget.WAIT_S, abs=0.1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(room.reserve, 30)
        await trio.sleep(0.5)
        room.give_back(80)
    assert room.held == 30


async def test_a_flood_from_one_address_keeps_no_other_out(autojump_clock):
    places = Strangers()
    flood = [await places.enter("10.0.0.1") for _ in range(MOST_OF_ONE)]
    other = await places.enter("10.0.0.2")
    assert other is not None
    assert not any(place.scope.cancel_called for place in flood)
    began = trio.current_time()
    late = await places.enter("10.0.0.1")  # waits until one of its own connections has timed out
    assert trio.current_time() - began == pytest.approx(YOUNG_S, abs=0.5)
    assert late is not None
    assert flood[0].scope.cancel_called
    assert not other.scope.cancel_called
    for place in flood:
        places.leave(place)
    assert len(places) == 2


async def test_a_flood_from_many_addresses_makes_room_for_a_newcomer(autojump_clock):
    places = Strangers()
    honest = await places.enter("10.9.9.9")
    for i in range(2 * MOST):
        assert await places.enter(f"10.0.{i % 16}.1") is not None
        assert len(places) <= MOST
    assert not honest.scope.cancel_called
    newcomer = await places.enter("10.9.9.8")
    assert newcomer is not None
    assert not honest.scope.cancel_called


async def test_connections_without_a_valid_head_are_rate_limited(autojump_clock):
    places = Strangers()

    async def knock(address: str, valid: bool) -> bool:
        place = await places.enter(address)
        if place is not None:
            (places.known if valid else places.leave)(place)
        return place is not None

    burst = int(strangers.RATE.burst)
    assert all([await knock("10.0.0.1", False) for _ in range(burst)])
    assert not await knock("10.0.0.1", False)
    assert all([await knock("10.0.0.2", True) for _ in range(2 * burst)]), "an address that sends valid heads may"
    await trio.sleep(1.0)
    assert await knock("10.0.0.1", False)


def test_all_addresses_of_a_site_count_as_one_client():
    assert address_of("::ffff:10.1.2.3") == address_of("10.1.2.3") == "10.1.2.3"
    assert address_of("2001:db8:1:2::1") == address_of("2001:db8:1:2:ffff::1") != address_of("2001:db8:1:3::1")
    assert address_of("fe80::1%eth0") == "fe80::/64"
    assert address_of("") == ""


async def test_a_client_that_hangs_up_leaves_the_queue_of_the_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two requests are parsed at a time; waiting requests whose clients hung up are never parsed."""
    import threading

    started, go_on, seen = threading.Semaphore(0), threading.Event(), []

    def slow(body, text, session, **how):
        seen.append(body.prompt)
        started.release()
        go_on.wait(20)
        from node.gateway.parsed_request import parse_completion

        return parse_completion(body, text, session, **how)

    monkeypatch.setattr("node.gateway.app.parse_completion", slow)
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)
        streams = []
        for letter in "abcdef":
            stream = await trio.open_tcp_stream(*host_and_port(url))
            body = json.dumps({"prompt": letter, "max_tokens": 2}).encode()
            await stream.send_all(head(len(body)) + body)
            streams.append(stream)
            if len(streams) == 2:
                for _ in range(2):
                    assert await trio.to_thread.run_sync(started.acquire, True, 10)
        await trio.sleep(0.2)
        assert sorted(seen) == ["a", "b"]
        for stream in streams[2:5]:
            await stream.aclose()
        await trio.sleep(0.2)
        go_on.set()
        with trio.fail_after(10):
            assert b" 200 " in await streams[5].receive_some(65536)
        assert sorted(seen) == ["a", "b", "f"]
        for stream in (*streams[:2], streams[5]):
            await stream.aclose()
