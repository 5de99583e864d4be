"""Who may ask what of a vLLM that holds a policy, and which vLLMs are refused: the plugin's front before an application
that says yes to all. One process is asked everything: importing vLLM takes seconds."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

SCRIPT = """
import asyncio, json, sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace as Space
from swarm_vllm.front import SwarmFront, _refusal

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})

async def statuses(load_format, questions):
    client = Space(vllm_config=Space(load_config=Space(load_format=load_format)))
    front, found = SwarmFront(app), []
    for address, path in questions:
        scope = {"type": "http", "method": "POST", "path": path, "client": (address, 1),
                 "app": Space(state=Space(engine_client=client))}
        async def send(event):
            if event["type"] == "http.response.start":
                found.append(event["status"])
        async def receive():
            return {"type": "http.request", "body": b"{}"}
        await front(scope, receive, send)
    return found

def refused(folder, where, value):
    config = Space(
        parallel_config=Space(nnodes=1, distributed_executor_backend="mp", pipeline_parallel_size=1,
                              data_parallel_size=1, enable_eplb=False),
        model_config=Space(model=folder, tokenizer=folder, logprobs_mode="processed_logprobs", hf_overrides={}),
        weight_transfer_config=Space(backend="swarm"), lora_config=None, speculative_config=None,
        args=Space(chat_template=None))
    at, names = config, where.split(".")
    for name in names[:-1]:
        at = getattr(at, name)
    if where:
        setattr(at, names[-1], value)
    return _refusal(config, Space(args=config.args), Path(config.model_config.model))

def development_routes():
    from fastapi import FastAPI
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.entrypoints.serve import register_vllm_dev_api_routers
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    return [("203.0.113.9", route.path) for route in app.routes]

asked = json.loads(sys.argv[1])
development = development_routes()
print(json.dumps({
    "statuses": [asyncio.run(statuses(*each)) for each in asked["statuses"]],
    "refused": [refused(*each) for each in asked["refused"]],
    "development": dict(zip([path for _, path in development], asyncio.run(statuses("auto", development)))),
}))
"""
HERE, THERE = "127.0.0.1", "203.0.113.9"
ROUTES = ("/pause", "/update_weights", "/collective_rpc", "/sleep", "/swarm/attach")
STATUSES = [
    ["auto", [*((THERE, route) for route in ROUTES), (HERE, "/pause"), (HERE, ROUTES[-1]), (THERE, "/v1/completions")]],
    ["swarm", [(HERE, "/v1/completions"), (THERE, "/v1/chat/completions"), (HERE, "/health")]],
]
REFUSED = [
    ("", None, ""),
    ("weight_transfer_config", None, "--weight-transfer-config"),
    ("weight_transfer_config.backend", "nccl", "--weight-transfer-config"),
    ("parallel_config.nnodes", 2, "several machines"),
    ("parallel_config.distributed_executor_backend", "ray", "several machines"),
    ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
    ("parallel_config.data_parallel_size", 2, "one engine a replica"),
    ("parallel_config.enable_eplb", True, "--enable-eplb"),
    ("lora_config", {}, "LoRA"),
    ("speculative_config", {}, "second model"),
    ("model_config.logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
    ("model_config.model", "Qwen/Qwen3-8B", "not a folder"),
    ("model_config.tokenizer", "elsewhere", "leave out --tokenizer"),
    ("model_config.hf_overrides", {"rope_theta": 5}, "--hf-overrides"),
    ("args.chat_template", "mine.jinja", "--chat-template"),
]


@pytest.fixture(scope="module")
def said(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("model"))
    asked = {"statuses": STATUSES, "refused": [(folder, where, value) for where, value, _ in REFUSED]}
    words = [python, "-c", SCRIPT, json.dumps(asked)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_routes_that_change_weights_are_for_this_machine_only(said):
    # attached to nothing: the body names no socket
    assert said["statuses"][0] == [*[403] * len(ROUTES), 200, 400, 200]


def test_each_development_route_that_this_vllm_has_is_for_this_machine_only(said):
    assert len(said["development"]) > 15
    assert set(said["development"].values()) == {403}, said["development"]


def test_an_engine_that_is_not_proven_answers_nobody(said):
    assert said["statuses"][1] == [503, 503, 200]


@pytest.mark.parametrize("i", range(len(REFUSED)), ids=[f"{where}={value}" for where, value, _ in REFUSED])
def test_engines_that_could_not_stay_exact_are_refused_in_a_sentence(said, i: int):
    wanted = REFUSED[i][2]
    assert (said["refused"][i] == "") == (wanted == "")
    assert wanted in said["refused"][i]
