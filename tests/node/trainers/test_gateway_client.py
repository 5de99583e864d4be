"""What adapters of trainers ask the gateway: what is asked again, for how long, and what is said about it."""

import json
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

pytest.importorskip("httpx")

from scripted_gateway import drawn, gateway, refused

from codec.errors import UsageError
from node.host.port import free_port
from node.trainers import gateway_client
from node.trainers.errors import SwarmDown, SwarmTimeout
from node.trainers.gateway_client import GatewayClient, GatewayRefused
from node.trainers.slime_engine import Engine

RESTARTS = "The seed is away: it restarts."
REQUEST = {"prompt": [1, 2], "max_tokens": 3}


@pytest.fixture(params=["asyncio", "trio"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def draw(url: str, backend: str = "trio", session: str = "", **options: Any) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with GatewayClient(url, **options) as client:
            return await client.draw(REQUEST, session)

    return anyio.run(ask, backend=backend)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Our own log lines."""
    return [record.getMessage() for record in caplog.records if record.name == "node.trainers"]


@pytest.mark.parametrize("status", [429, 503])
def test_what_is_refused_for_the_moment_is_asked_again_and_said(
    backend: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    with gateway(refused(status, RESTARTS), refused(status, RESTARTS), drawn([7, 8])) as server:
        assert draw(server.url, backend)["token_ids"] == [7, 8]
        assert server.asked == [REQUEST] * 3
    (line,) = said(caplog)  # once a minute
    assert RESTARTS in line
    assert str(status) in line


def test_the_repeating_has_a_bound_and_ends_with_the_gateways_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "REPEATED_S", {429: 0.2, 503: 0.2})
    with gateway(refused(503, RESTARTS, "0.1")) as server:
        with pytest.raises(GatewayRefused, match=RESTARTS) as caught:
            draw(server.url)
        assert 2 <= len(server.asked) <= 4
    copy = pickle.loads(pickle.dumps(caught.value))  # as Ray brings it from an actor
    assert (str(copy), copy.status, copy.body) == (str(caught.value), 503, caught.value.body)
    assert json.loads(caught.value.body)["error"]["message"] == RESTARTS


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500, 502])
def test_any_other_refusal_is_final(status: int) -> None:
    with gateway(refused(status, "No.")) as server:
        with pytest.raises(GatewayRefused, match=f"{status}: No."):
            draw(server.url)
        assert len(server.asked) == 1


def test_a_gateway_that_is_not_started_is_named(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_client, "UNREACHABLE_S", 0.1)
    monkeypatch.setattr(gateway_client, "RETRY_S", 0.1)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(SwarmDown, match=f"{url} .*start swarm-node gateway"):
        draw(url, backend)
    assert "start swarm-node gateway" in said(caplog)[0]


def test_an_answer_that_takes_too_long_is_an_error() -> None:
    with gateway(drawn([1])) as server:
        server.answer = lambda _: (time.sleep(0.5), drawn([1]))[1]
        with pytest.raises(SwarmTimeout, match="no answer within"):
            draw(server.url, timeout_s=0.1)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "", "ftp://x"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(UsageError, match="no URL"):
        GatewayClient(url)


def test_session_and_key_are_sent_if_there_are_any(backend: str) -> None:
    with gateway(drawn([1])) as server:
        draw(server.url, backend, "one", api_key="secret")
        draw(server.url, backend)
        assert server.asked == [REQUEST | {"session_id": "one"}, REQUEST]
        assert server.keys == ["Bearer secret", None]


def generate(url: str, **headers: str) -> Any:
    """What `slime_engine` answers to a request."""
    body = json.dumps({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}, "rid": "a"}).encode()

    async def ask() -> Any:
        async with GatewayClient(url) as client:
            asked: Any = SimpleNamespace(method="POST", path="/generate", headers=headers, body=body)
            return await Engine(client)(asked)

    return anyio.run(ask, backend="trio")


def test_slimes_routing_key_is_the_session() -> None:
    with gateway(drawn([7])) as server:
        answer = generate(server.url, **{"x-smg-routing-key": "a conversation"})
        assert json.loads(answer.body)["meta_info"]["output_token_logprobs"] == [[-0.5, 7, None]]
        assert server.asked[0]["session_id"] == "a conversation"


def test_slimes_engine_says_that_the_gateway_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_client, "UNREACHABLE_S", 0.0)
    answer = generate(f"http://127.0.0.1:{free_port()}")
    assert answer.status == 503
    assert b"start swarm-node gateway" in answer.body


def test_slimes_engine_passes_on_what_the_gateway_refuses() -> None:
    with gateway(refused(400, "The prompt is empty.")) as server:
        answer = generate(server.url)
    assert (answer.status, json.loads(answer.body)["error"]["message"]) == (400, "The prompt is empty.")


def test_an_abort_by_name_ends_only_that_request() -> None:
    async def run() -> list[str]:
        async with GatewayClient(server.url) as client:
            engine = Engine(client)
            found: dict[str, str] = {}

            async def ask(rid: str) -> None:
                body = json.dumps({"input_ids": [1], "sampling_params": {}, "rid": rid}).encode()
                answer: Any = await engine(_post("/generate", body))
                found[rid] = json.loads(answer.body)["meta_info"]["finish_reason"]["type"]

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask, "one")
                tasks.start_soon(ask, "two")
                while len(server.asked) < 2:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                await engine(_post("/abort_request", b'{"rid": "one"}'))
                while "one" not in found:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                go.set()
            return [found["one"], found["two"]]

    go = threading.Event()
    with gateway(drawn([1])) as server:
        server.answer = lambda _: (go.wait(10), drawn([1]))[1]
        assert anyio.run(run, backend="trio") == ["abort", "stop"]


def _post(path: str, body: bytes) -> Any:
    return SimpleNamespace(method="POST", path=path, headers={}, body=body)
