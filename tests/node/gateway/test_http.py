"""Hostile HTTP: the gateway answers or closes each connection, uses little memory, and continues."""

import json
import threading
import time
from pathlib import Path

import pytest
import trio
from gateway_kit import base_files, gateway, raw, with_client

from codec.errors import UsageError
from node.gateway.text import Text
from node.http import HttpLimits, Request, Response, json_response, serve
from node.settings.config import GatewayConfig

GOOD = json.dumps({"prompt": "abc", "max_tokens": 4}).encode()


def post(body: bytes, *headers: str, path: str = "/v1/completions", length: int | None = None) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body) if length is None else length}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


NESTED = b"[" * 100_000
HOSTILE = {
    "not http": (b"\x16\x03\x01\x02\x00hello there\r\n\r\n", 400),
    "a space in a header": (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
    "no end of headers": (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 70_000, 431),
    "two lengths": (post(b"{}", "Content-Length: 7"), 400),
    "length and chunks": (post(GOOD, "Transfer-Encoding: gzip"), 501),
    "too large": (post(b"", length=1 << 40), 413),
    "a wrong length": (post(GOOD, length=-5), 400),
    "not json": (post(b"{" * 40), 400),
    "deep json": (post(b'{"prompt": ' + NESTED), 400),
    "json of another shape": (post(b'{"prompt": {"a": 1}}'), 400),
    "a list": (post(b"[]"), 400),
    "not utf-8": (post(b'{"prompt": "\xff\xfe"}'), 400),
    "huge numbers": (post(b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}"), 400),
    "another type": (post(GOOD).replace(b"application/json", b"text/plain"), 400),
    "a web page": (post(GOOD, "Origin: https://evil.example"), 403),
    "chunks": (post(GOOD).replace(b"Content-Length: %d" % len(GOOD), b"Transfer-Encoding: chunked"), 411),
    "a length of a thousand digits": (post(b"").replace(b"Length: 0", b"Length: " + b"1" * 1000), 400),
    "a thousand headers": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"a:b\r\n" * 1000 + b"\r\n", 431),
    "a GET with a body": (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n", 400),
    "half a surrogate": (post(b'{"prompt": "\\ud800\\u0041"}'), 400),
    "half a surrogate for a name": (post(b'{"prompt": "a", "user": "\\udc00b"}'), 400),
    "an integer of 5000 digits": (post(b'{"prompt": "a", "logit_bias": {"a": 1' + b"0" * 5000 + b"}}"), 400),
    "an exponent": (post(b'{"prompt": "a", "temperature": 1e400}'), 400),
    "tokens that are none": (post(b'{"prompt": [1e9, -1]}'), 400),
    "brackets": (post(b'{"prompt": "a", "logit_bias": {"a": [' + b"[]," * 300_000 + b"[]]}}"), 400),
    "another path": (post(GOOD, path="/v1/../etc/passwd"), 404),
    "another method": (b"DELETE /v1/models HTTP/1.1\r\nHost: x\r\n\r\n", 405),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_hostile_requests_get_an_answer_and_change_nothing(tmp_path: Path, what: str):
    data, code = HOSTILE[what]
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)
        answer_bytes = await raw(url, data)
        assert answer_bytes.split(b" ", 2)[:2] == [b"HTTP/1.1", str(code).encode()], answer_bytes[:300]
        body = json.loads(answer_bytes.partition(b"\r\n\r\n")[2])
        assert 5 < len(body["error"]["message"]) < 600
        assert b"Traceback" not in answer_bytes
        good = await raw(url, post(GOOD))
        assert b'"text":"cba"' in good


async def test_an_answer_to_head_is_a_head(tmp_path: Path):
    """h11 raises an error for a body after it, which would be a bug that any client could cause."""
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)
        for path in ("/v1/models", "/v1/completions", "/nowhere"):
            answer_bytes = await raw(url, f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode(), within_s=1.0)
            head, _, rest = answer_bytes.partition(b"\r\n\r\n")
            assert head.split(b" ")[1] in (b"404", b"405"), answer_bytes[:300]
            assert b"content-length" in head.lower()
            assert rest == b""
        assert b'"text":"cba"' in await raw(url, post(GOOD))


async def test_one_connection_may_send_several_requests_also_at_once(tmp_path: Path):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)
        answer_bytes = await raw(url, post(GOOD) + post(GOOD), within_s=1.0)
        host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            for _ in range(3):
                await stream.send_all(post(GOOD))
                part = await stream.receive_some(65536)
                assert b'"text":"cba"' in part
        assert answer_bytes.count(b"HTTP/1.1 200") >= 1
        bytewise = post(GOOD)
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            for i in range(len(bytewise)):
                await stream.send_all(bytewise[i : i + 1])
            assert b'"text":"cba"' in await stream.receive_some(65536)


async def answer(request: Request) -> Response:
    if request.path == "/forever":
        await trio.sleep_forever()
    return json_response({"bytes": len(request.body)})


@pytest.mark.parametrize(
    ("sent", "limits", "after_s", "says"),
    [
        (b"", {"idle_s": 5.0}, 5.0, b""),
        (b"GET / HTTP/1.1\r\nHo", {"head_s": 3.0}, 3.0, b"408"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", {"body_s": 7.0, "head_s": 3.0}, 7.0, b"408"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", {"idle_s": 9.0}, 9.0, b"200"),
    ],
)
async def test_a_slow_client_is_disconnected(autojump_clock, sent, limits, after_s, says):
    async with trio.open_nursery() as nursery:
        port = await nursery.start(
            lambda task_status: serve(answer, "127.0.0.1", 0, HttpLimits(**limits), task_status=task_status)
        )
        autojump_clock.autojump_threshold = 0.05
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            began = trio.current_time()
            await stream.send_all(sent)
            answer_bytes = b"".join([part async for part in stream])
            assert trio.current_time() - began == pytest.approx(after_s, abs=1.5)
            assert says in answer_bytes
        nursery.cancel_scope.cancel()


async def test_disconnects_are_noticed_and_connections_counted():
    cancelled = trio.Event()

    async def handler(request: Request) -> Response:
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()
        raise AssertionError

    async with trio.open_nursery() as nursery:
        limits = HttpLimits(connections=2)
        port = await nursery.start(lambda task_status: serve(handler, "127.0.0.1", 0, limits, task_status=task_status))
        first = await trio.open_tcp_stream("127.0.0.1", port)
        await first.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        second = await trio.open_tcp_stream("127.0.0.1", port)
        await second.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await trio.sleep(0.1)
        third = await trio.open_tcp_stream("127.0.0.1", port)
        await third.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        answer_bytes = b"".join([part async for part in third])
        assert b" 429 " in answer_bytes
        await first.aclose()
        with trio.fail_after(2):
            await cancelled.wait()
        await second.aclose()
        nursery.cancel_scope.cancel()


async def test_a_bug_costs_one_request_only(tmp_path: Path, monkeypatch):
    async with gateway(tmp_path) as (swarm, url):
        await swarm.add(1)
        monkeypatch.delenv("SWARM_STRICT")
        monkeypatch.setattr("node.gateway.app.parse_completion", lambda *_, **__: 1 / 0)
        answer_bytes = await raw(url, post(GOOD))
        assert b" 500 " in answer_bytes.splitlines()[0]
        monkeypatch.undo()

        async def use(client):
            return await client.completions.create(model="policy", prompt="abc")

        assert (await with_client(url, use)).choices[0].text == "cba"


def test_a_gateway_beyond_this_machine_needs_a_key():
    with pytest.raises(UsageError, match="make a key"):
        GatewayConfig(at="0.0.0.0:8000")
    with pytest.raises(UsageError, match="make a key"):
        GatewayConfig(at="8000")
    assert GatewayConfig(at="0.0.0.0:8000", api_key="sesame").host == "0.0.0.0"
    assert GatewayConfig(at="[::1]:9").port == 9
    for wrong in ({"at": "x:70000"}, {"in_flight": 0}, {"max_lag": -1}, {"model_name": ""}):
        with pytest.raises(UsageError, match=r"--|port"):
            GatewayConfig(**wrong)


def test_the_process_continues_while_a_long_prompt_is_tokenized():
    """Regression: the tokenizer held Python's lock, so a prompt of 4 MiB delayed the seed's heartbeats by six
    seconds."""
    text, turns, reading = Text(base_files()), 0, threading.Event()

    def read() -> None:
        reading.set()
        text.encode("a" * (1 << 18))
        reading.clear()

    reader = threading.Thread(target=read)
    reader.start()
    reading.wait()
    while reading.is_set() and turns <= 30:
        time.sleep(0)
        turns += 1
    reader.join()
    assert turns > 30, "it was about a dozen for any length while the lock was held"
