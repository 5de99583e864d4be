"""The memory of all answers together is bounded, also for clients with the key that ask for much and read slowly or
never."""

import contextlib
import json
from pathlib import Path

import pytest
import trio
from gateway_kit import base_files, gateway, raw, until

from node.gateway import app
from node.http import HttpLimits, Request, Response, Send, serve
from node.http.memory_budget import MemoryBudget

CONTEXT = 16384
PROMPT = "abcd" * 2048


def files() -> dict[str, bytes]:
    return base_files() | {"config.json": json.dumps({"max_position_embeddings": CONTEXT}).encode()}


def post(path: str = "/v1/completions", **body: object) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def host_and_port(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    return host, int(port)


async def read_chunked(url: str, request: bytes) -> tuple[bytes, bytes]:
    """Return (head, body) of a chunked answer."""
    answer_bytes = b""
    async with await trio.open_tcp_stream(*host_and_port(url)) as stream:
        await stream.send_all(request)
        with trio.fail_after(60):
            while not answer_bytes.endswith(b"0\r\n\r\n"):
                part = await stream.receive_some(1 << 20)
                assert part, answer_bytes[-200:]
                answer_bytes += part
    head, _, rest = answer_bytes.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return head, body


@pytest.fixture
def budgets(monkeypatch: pytest.MonkeyPatch) -> list[MemoryBudget]:
    """The budgets that an `App` creates: `held` and `encoded`. Each records its peak."""
    made: list[MemoryBudget] = []

    class Watched(MemoryBudget):
        def __init__(self, *args: float) -> None:
            self.peak = 0
            super().__init__(*args)
            made.append(self)

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "held":
                self.peak = max(self.peak, value)

    monkeypatch.setattr(app, "MemoryBudget", Watched)
    return made


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate"])
async def test_a_large_answer_is_the_same_at_once_and_in_parts(tmp_path: Path, monkeypatch, budgets, path: str):
    """The JSON is the same whether it is sent at once or in parts."""
    asked = {
        "/v1/completions": {"prompt": PROMPT, "logprobs": 0},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True},
        "/inference/v1/generate": {"token_ids": [1, 2, 3] * 2000, "sampling_params": {"n": 8, "max_tokens": 4}},
    }[path]
    if "sampling_params" not in asked:
        asked |= {"n": 8, "max_tokens": 4}
    async with gateway(tmp_path, files()) as (swarm, url):
        await swarm.add(1)
        head, body = await read_chunked(url, post(path, **asked))
        assert head.startswith(b"HTTP/1.1 200")
        assert b"chunked" in head.lower()
        monkeypatch.setattr(app, "AT_ONCE_BYTES", 1 << 30)
        answer_bytes = await raw(url, post(path, **asked))
        assert b"content-length" in answer_bytes.partition(b"\r\n\r\n")[0].lower()
        there, here = json.loads(body), json.loads(answer_bytes.partition(b"\r\n\r\n")[2])
        assert len(there["choices"]) == 8
        for each in (there, here):
            for name in ("id", "created", "request_id"):
                each.pop(name, None)
        assert there == here
        await until(lambda: not any(budget.held for budget in budgets))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
async def test_answers_that_nobody_reads_are_bounded_together(tmp_path: Path, monkeypatch, budgets, stream: bool):
    """Forty clients ask for a prompt of 8,192 tokens back 25 times each, and read nothing. All answers together stay
    within both budgets, clients that find them full get 503, and the memory is free after the clients have gone."""
    monkeypatch.setattr(app, "HELD_BYTES", 1 << 20)
    monkeypatch.setattr(app, "ENCODED_BYTES", 1 << 20)
    async with gateway(tmp_path, files()) as (swarm, url):
        await swarm.add(1)
        streams: list[trio.SocketStream] = []
        for _ in range(40):
            stream_ = await trio.open_tcp_stream(*host_and_port(url))
            stream_.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 4096)
            await stream_.send_all(post(prompt=PROMPT, n=25, max_tokens=4, stream=stream))
            streams.append(stream_)
        await trio.sleep(2.0)
        held, encoded = budgets
        assert 0 < encoded.peak <= encoded.most == 1 << 20
        assert 0 < held.peak <= held.most + 40 * 25 * 4 * 8, "beyond it only the samples that were in flight"
        answer_bytes = await raw(url, post(prompt=PROMPT, n=1, max_tokens=4))
        assert answer_bytes.startswith(b"HTTP/1.1 503 "), answer_bytes[:300]
        assert b"retry-after" in answer_bytes.lower()
        for each in streams:
            await each.aclose()
        await until(lambda: not any(budget.held for budget in budgets), 30)
        assert (await raw(url, post(prompt="abc", max_tokens=4))).startswith(b"HTTP/1.1 200 ")


async def test_a_client_that_reads_its_answer_too_slowly_is_disconnected(autojump_clock):
    """The client reads each part within the deadline of a write, but the whole answer below the minimum rate."""
    limits = HttpLimits(write_s=5.0, write_rate=1 << 20)
    ended: list[float] = []

    async def endless(send: Send) -> None:
        try:
            while True:
                await send(b"x" * (64 << 10))
        finally:
            ended.append(trio.current_time())

    async def answer(request: Request) -> Response:
        return Response(200, endless)

    async with trio.open_nursery() as nursery:
        port = await nursery.start(lambda task_status: serve(answer, "127.0.0.1", 0, limits, task_status=task_status))
        autojump_clock.autojump_threshold = 0.05
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            with trio.move_on_after(120), contextlib.suppress(trio.BrokenResourceError):
                while await stream.receive_some(1 << 18):  # noqa: ASYNC110 - a slow reader
                    await trio.sleep(1.0)  # a quarter of the minimum rate
        assert ended
        assert ended[0] < 100
        nursery.cancel_scope.cancel()
