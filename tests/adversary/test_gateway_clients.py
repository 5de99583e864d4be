"""HTTP clients of the gateway and of the seed behind it: without a key, with one, slow, many, or garbled."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from arena_kit import FLOOD_S, FULL, LATE_S, MIB, Arena, arena_in, observed
from stranger_kit import BROKEN, quietly

pytestmark = [pytest.mark.slow, pytest.mark.adversary, pytest.mark.alone]
pytest.importorskip("h11")

API_KEY = "correct-horse-battery-staple"
BODY = b"x" * (8 * MIB - 1024)
"""Just below the limit of a request's body."""


class Gateway:
    """A seed with its gateway."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        home = {"SWARM_HOME": str(arena.swarm.home("seed")), "SWARM_API_KEY": API_KEY}
        arena.swarm.start("gateway", "gateway", "--at", "127.0.0.1:0", "--json", **home)
        arena.swarm.until_logged("gateway", '"url"')
        self.port = int(json.loads(arena.log("gateway"))["url"].split(":")[2].split("/")[0])

    @property
    def rss_bytes(self) -> int:
        """Of the process that listens and of the seed."""
        return sum(self.arena.process(name).rss_bytes for name in ("seed", "gateway"))

    async def open(self, source: str = "127.0.0.1") -> trio.SocketStream:
        return await trio.open_tcp_stream("127.0.0.1", self.port, local_address=source)

    async def answer(self, *parts: bytes, within_s: float = 10.0) -> bytes:
        """The answer to these bytes, until the gateway closes the connection or is silent for `within_s`."""
        answer = b""
        async with await self.open() as stream:
            with quietly(*BROKEN):
                for part in parts:
                    await stream.send_all(part)
            with trio.move_on_after(within_s), quietly(*BROKEN):
                while data := await stream.receive_some(65536):
                    answer += data
                    if b"\r\n\r\n" in answer and answer.endswith(b"}"):
                        break
        return answer

    async def serves(self) -> None:
        """Assert that a client with the key is answered within 5 s."""
        with trio.fail_after(5):
            answer = await self.answer(head("GET", "/v1/models", key=API_KEY))
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]


def head(method: str, path: str, *, key: str = "", length: int | None = None, more: str = "") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *([f"Authorization: Bearer {key}"] if key else [])]
    lines += [f"Content-Length: {length}"] if length is not None else []
    return ("\r\n".join(lines) + "\r\n" + more + "\r\n").encode("latin-1")


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    with arena_in(tmp_path, box=False) as arena:
        yield Gateway(arena)
        arena.unharmed()


async def peak_of(gateway: Gateway, seconds: float) -> int:
    """The peak resident memory of the gateway in the next `seconds`, bytes."""
    peak = 0
    with trio.move_on_after(seconds):
        while True:
            peak = max(peak, gateway.rss_bytes)
            await trio.sleep(0.05)
    return peak


async def bodies(gateway: Gateway, clients: int, key: str, *, whole: bool) -> int:
    """`clients` clients send a body of 8 MiB each (unless `whole`: all but its last byte); returns how much the
    gateway's memory grew, in bytes."""
    before, peak = gateway.rss_bytes, 0
    start = head("POST", "/v1/completions", key=key, length=len(BODY) + (0 if whole else 1))

    async def one() -> None:
        async with await gateway.open() as stream:
            with quietly(*BROKEN):
                await stream.send_all(start)
                await stream.send_all(BODY)
                await trio.sleep(FLOOD_S + 2)

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(one)
        peak = await peak_of(gateway, FLOOD_S + 2)
        nursery.cancel_scope.cancel()
    return peak - before


HELD, SENT = pytest.param(False, id="held"), pytest.param(True, id="sent")


@pytest.mark.parametrize("whole", [HELD, SENT] if FULL else [HELD])
async def test_10_bodies_without_a_key(gateway: Gateway, whole: bool) -> None:
    before = gateway.rss_bytes
    async with observed(gateway.arena) as observer:
        grew = await bodies(gateway, 100, "", whole=whole)
        assert grew < 64 * MIB, f"{grew / MIB:.0f} MiB for 100 clients without a key"
        assert observer.late_s < LATE_S
    await gateway.serves()
    await trio.sleep(1)
    kept = gateway.rss_bytes - before
    assert kept < 32 * MIB, f"{kept / MIB:.0f} MiB are not freed"


async def test_10_key_is_checked_before_the_body(gateway: Gateway) -> None:
    for key in ("", "wrong", "\xff\xfe"):
        answer = await gateway.answer(head("POST", "/v1/completions", key=key, length=len(BODY)), within_s=3)
        assert answer.startswith(b"HTTP/1.1 401"), answer[:100]
    for path, length, code in (("/v1/completions", 9 * MIB, b"413"), ("/nothing", 100, b"404")):
        answer = await gateway.answer(head("POST", path, key=API_KEY, length=length), within_s=3)
        assert answer.startswith(b"HTTP/1.1 " + code), answer[:100]


@pytest.mark.parametrize("whole", [HELD, SENT] if FULL else [SENT])
@pytest.mark.long
async def test_bodies_with_a_key_are_bounded_together(gateway: Gateway, whole: bool) -> None:
    async with observed(gateway.arena) as observer:
        grew = await bodies(gateway, 100, API_KEY, whole=whole)
        assert observer.late_s < LATE_S
    assert grew < 128 * MIB, f"{grew / MIB:.0f} MiB for 100 clients with a key"
    await trio.sleep(1)
    await gateway.serves()


GARBLED = {
    "no HTTP": b"\x16\x03\x01\x02\x00" + b"\xff" * 500 + b"\r\n\r\n",
    "endless head": b"GET / HTTP/1.1\r\nX: " + b"y" * 100_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    "length twice": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    "length of a hundred digits": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + b"9" * 100 + b"\r\n\r\n",
    "length and chunks": head("POST", "/v1/completions", key=API_KEY, length=3, more="Transfer-Encoding: chunked\r\n"),
    "chunk of 2^64": head("POST", "/v1/completions", key=API_KEY, more="Transfer-Encoding: chunked\r\n")
    + b"ffffffffffffffff\r\n" + b"x" * 1000,
    "bytes in the path": b"GET /\xff\xfe\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    "key that is no text": b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
}  # fmt: skip


def post(path: str, body: bytes) -> bytes:
    return head("POST", path, key=API_KEY, length=len(body)) + body


ODD_BODIES = {
    "nested": b'{"model":"policy","prompt":' + b"[" * 100_000,
    "nested and closed": b'{"model":"policy","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "surrogate": b'{"model":"policy","prompt":"\\ud800"}',
    "no UTF-8": b'{"model":"policy","prompt":"\xff\xfe"}',
    "huge number": b'{"model":"policy","prompt":[1],"max_tokens":' + b"9" * 5000 + b"}",
    "NaN": b'{"model":"policy","prompt":[1],"temperature":NaN}',
    "1e999": b'{"model":"policy","prompt":[1],"temperature":1e999}',
    "negative tokens": b'{"model":"policy","prompt":[-1]}',
    "a million choices": b'{"model":"policy","prompt":[1],"n":1000000}',
    "a million stops": b'{"model":"policy","prompt":[1],"stop":[' + b'"a",' * 100_000 + b'"a"]}',
    "a million tokens": b'{"model":"policy","prompt":[' + b"1," * 1_000_000 + b"1]}",
    "prompts by the thousand": b'{"model":"policy","prompt":[' + b"[1]," * 100_000 + b"[1]]}",
}


async def test_garbled_requests_cost_one_connection(gateway: Gateway) -> None:
    for data in GARBLED.values():
        answer = await gateway.answer(data, within_s=3)
        assert not answer or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    for path in ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"):
        for name, body in ODD_BODIES.items():
            answer = await gateway.answer(post(path, body), within_s=5)
            assert not answer.startswith(b"HTTP/1.1 500"), (path, name, answer[:300])
    await gateway.serves()


async def test_slow_and_many_clients_keep_no_other_client_out(gateway: Gateway) -> None:
    """From eight addresses: heads sent one byte a second, answers that are never read, silent connections."""
    before = gateway.rss_bytes
    pipelined = head("GET", "/v1/models", key=API_KEY) * 2000

    async def slow(source: str, data: bytes, pause_s: float) -> None:
        with quietly(*BROKEN):
            async with await gateway.open(source) as stream:
                for at in range(len(data)):
                    await stream.send_all(data[at : at + 1])
                    await trio.sleep(pause_s)

    async def never_read(source: str) -> None:
        with quietly(*BROKEN):
            async with await gateway.open(source) as stream:
                while True:
                    await stream.send_all(pipelined)

    async with observed(gateway.arena) as observer, trio.open_nursery() as nursery:
        for i in range(600):
            nursery.start_soon(slow, f"127.1.0.{i % 8 + 1}", head("GET", "/v1/models") if i % 2 else b"", 1.0)
        for i in range(16):
            nursery.start_soon(never_read, f"127.1.0.{i % 8 + 1}")
        await trio.sleep(FLOOD_S)
        await gateway.serves()
        assert observer.late_s < LATE_S
        grew = gateway.rss_bytes - before
        nursery.cancel_scope.cancel()
    assert grew < 64 * MIB, f"{grew / MIB:.0f} MiB"
