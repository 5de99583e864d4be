"""Who may ask what of a vLLM that holds a policy: the plugin's front before an application that says yes to all."""

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

ASK = """
import asyncio, json, sys
from types import SimpleNamespace as Space
from swarm_vllm.front import SwarmFront

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})

async def main():
    client = Space(vllm_config=Space(load_config=Space(load_format=sys.argv[1])))
    front, found = SwarmFront(app), []
    for address, path in json.loads(sys.argv[2]):
        scope = {"type": "http", "method": "POST", "path": path, "client": (address, 1),
                 "app": Space(state=Space(engine_client=client))}
        async def send(event):
            if event["type"] == "http.response.start":
                found.append(event["status"])
        async def receive():
            return {"type": "http.request", "body": b"{}"}
        await front(scope, receive, send)
    print(json.dumps(found))

asyncio.run(main())
"""
HERE, THERE = "127.0.0.1", "203.0.113.9"


def ask(python: Path, load_format: str, *questions: tuple[str, str]) -> list[int]:
    """The status that each (address, path) is answered with."""
    words = [python, "-c", ASK, load_format, json.dumps(questions)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_routes_that_change_weights_are_for_this_machine_only(python: Path) -> None:
    routes = ("/pause", "/update_weights", "/collective_rpc", "/sleep", "/swarm/attach")
    asked = [(THERE, route) for route in routes]
    assert ask(python, "auto", *asked, (HERE, "/pause"), (HERE, "/swarm/attach"), (THERE, "/v1/completions")) == [
        *[403] * len(routes),
        200,
        400,  # attached to nothing: the body names no socket
        200,
    ]


def test_an_engine_that_is_not_proven_answers_nobody(python: Path) -> None:
    assert ask(python, "swarm", (HERE, "/v1/completions"), (THERE, "/v1/chat/completions"), (HERE, "/health")) == [
        503,
        503,
        200,
    ]
