"""The monitor's endpoints over real sockets on loopback: who is answered, and with what."""

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from codec.errors import UsageError
from node.monitor import serve_monitor
from node.monitor.monitor import TOKEN_FILE, Answer, Monitor, own_status, token_of
from node.status.schema import NodeStatus, OwnStatus, Status
from scenarios.harness.made_up_swarm import made_up_status


async def get(
    port: int, path: str, *headers: str, host: str = "127.0.0.1", method: str = "GET"
) -> tuple[int, str, bytes]:
    """Status, head and body of one request."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers]
        await stream.send_all("\r\n".join(lines).encode() + b"\r\n\r\n")
        data = b""
        with trio.fail_after(10):
            while part := await stream.receive_some(65536):
                data += part
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode(), body


Use = Callable[[int], Awaitable[None]]


async def monitored(home: Path, status: Callable[[], Status], use: Use, host: str = "127.0.0.1") -> str:
    """Serve a monitor of `status` while `use(port)` runs. Returns its URL."""
    async with trio.open_nursery() as nursery:
        url = await nursery.start(serve_monitor, (host, 0), home, own_status(status))
        await use(int(url.split(":")[-1].split("/")[0]))
        nursery.cancel_scope.cancel()
    return url


async def test_the_page_and_what_it_asks_for(tmp_path: Path):
    async def use(port: int) -> None:
        code, head, body = await get(port, "/")
        assert (code, body[:15]) == (200, b"<!doctype html>")
        assert "default-src 'none'" in head
        assert len(body) < 100_000
        assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"")  # it asks no other host
        assert b"https://" not in body
        seen = json.loads((await get(port, "/api/status"))[2])
        assert seen["headline"] == "All 3 nodes have version 36, 9.1 s after its publish."
        assert (seen["status"]["role"], len(seen["status"]["nodes"]), seen["away"]) == ("seed", 3, "")
        frames = json.loads((await get(port, "/api/history"))[2])["frames"]
        assert len(frames) == 1
        code, _, body = await get(port, f"/api/frame?at={frames[0]['at']}")
        assert (code, json.loads(body)["status"]["head"]) == (200, [0, 36])

    await monitored(tmp_path, lambda: made_up_status(3, 719.9), use)


async def test_metrics_health_and_readiness(tmp_path: Path):
    status = NodeStatus(head=(0, 4), nodes=[OwnStatus(slot=1, standing="fresh", held=(0, 4), engine=None)])

    async def use(port: int) -> None:
        code, head, body = await get(port, "/metrics", "Accept: application/openmetrics-text; version=1.0.0")
        assert code == 200
        assert "application/openmetrics-text" in head
        assert body.endswith(b"# EOF\n")
        assert b'swarm_info{role="node"' in body
        assert (await get(port, "/healthz"))[0] == 200
        code, _, body = await get(port, "/readyz")
        assert (code, json.loads(body)) == (503, {"ready": False, "why": "The engine is not ready."})
        status.nodes[0].engine = (0, 4)
        await trio.sleep(0.6)
        assert (await get(port, "/readyz"))[0] == 200

    await monitored(tmp_path, lambda: status, use)


@pytest.mark.parametrize("path", ["/", "/api/status", "/metrics"])
async def test_a_web_page_of_another_site_reads_nothing(tmp_path: Path, path: str):
    async def use(port: int) -> None:
        assert (await get(port, path, host="evil.example"))[0] == 403  # its name was made to lead to 127.0.0.1
        assert (await get(port, path, host=f"localhost:{port}"))[0] == 200
        assert (await get(port, "/healthz", host="evil.example"))[0] == 200

    await monitored(tmp_path, lambda: made_up_status(2, 50.0), use)


async def test_on_other_addresses_all_but_the_health_needs_the_token(tmp_path: Path):
    async def use(port: int) -> None:
        token = (tmp_path / TOKEN_FILE).read_text().strip()
        for path in ("/", "/api/status", "/metrics", "/api/history"):
            assert (await get(port, path))[0] == 401
            assert (await get(port, f"{path}?token={token[:-1]}"))[0] == 401
            assert (await get(port, f"{path}?token={token}"))[0] == 200
            assert (await get(port, path, f"Authorization: Bearer {token}"))[0] == 200
        assert (await get(port, "/readyz"))[0] == 200
        assert (tmp_path / TOKEN_FILE).stat().st_mode & 0o777 == 0o600

    url = await monitored(tmp_path, lambda: made_up_status(2, 50.0), use, host="0.0.0.0")
    assert url.endswith(f"/?token={token_of(tmp_path)}")


async def test_it_changes_nothing_and_says_no(tmp_path: Path):
    async def use(port: int) -> None:
        assert (await get(port, "/api/status", method="POST"))[0] == 405
        assert (await get(port, "/etc/passwd"))[0] == 404
        assert (await get(port, "/api/frame?at=now"))[0] == 400
        assert (await get(port, "/api/frame?at=nan"))[0] == 400

    await monitored(tmp_path, lambda: made_up_status(2, 50.0), use)


async def test_a_process_that_is_away_is_shown_as_it_was(tmp_path: Path):
    answers = [Answer(made_up_status(2, 50.0)), Answer(made_up_status(2, 50.0), "It does not answer.")]

    async def source() -> Answer:
        await trio.lowlevel.checkpoint()
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async with trio.open_nursery() as nursery:
        url = await nursery.start(serve_monitor, ("127.0.0.1", 0), tmp_path, source)
        port = int(url.rstrip("/").rpartition(":")[2])
        await trio.sleep(0.6)  # the first answer was taken for the history
        seen = json.loads((await get(port, "/api/status"))[2])
        assert (seen["away"], seen["status"]["head"]) == ("It does not answer.", [0, 3])
        assert (await get(port, "/metrics"))[0] == 503
        assert (await get(port, "/readyz"))[0] == 503
        assert (await get(port, "/healthz"))[0] == 200
        nursery.cancel_scope.cancel()


async def test_many_looks_cost_one(tmp_path: Path):
    asked = 0

    async def source() -> Answer:
        nonlocal asked
        asked += 1
        await trio.sleep(0.01)
        return Answer(made_up_status(2, 50.0))

    monitor = Monitor(source)
    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(monitor.look)
    assert asked == 1


async def test_an_address_in_use_is_a_sentence(tmp_path: Path):
    async def use(port: int) -> None:
        other = partial(serve_monitor, ("127.0.0.1", port), tmp_path, own_status(lambda: made_up_status(1, 9.0)))
        with pytest.RaisesGroup(pytest.RaisesExc(UsageError, match="Choose another port"), flatten_subgroups=True):
            async with trio.open_nursery() as nursery:
                await nursery.start(other)

    await monitored(tmp_path, lambda: made_up_status(1, 9.0), use)
