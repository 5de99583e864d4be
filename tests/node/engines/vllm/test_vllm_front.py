"""The plugin's front, in front of an application that accepts every request: which requests pass, and which vLLMs are
refused.

One process answers all questions, because importing vLLM takes seconds.
"""

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
        weight_transfer_config=Space(backend="swarm"),
        load_config=Space(load_format="auto", model_loader_extra_config={}),
        lora_config=None, speculative_config=None,
        args=Space(chat_template=None))
    at, names = config, where.split(".")
    for name in names[:-1]:
        at = getattr(at, name)
    if where:
        setattr(at, names[-1], Space(**value) if where in ("lora_config", "speculative_config") else value)
    return _refusal(config, Space(args=config.args), Path(config.model_config.model))

def development_routes():
    from fastapi import FastAPI
    from vllm.entrypoints.rl.factories import register_rl_api_routers
    from vllm.entrypoints.serve import register_vllm_dev_api_routers
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    register_vllm_dev_api_routers(app)
    register_rl_api_routers(app)
    return [("203.0.113.9", route.path) for route in app.routes]

questions = json.loads(sys.argv[1])
development = development_routes()
print(json.dumps({
    "statuses": [asyncio.run(statuses(*each)) for each in questions["statuses"]],
    "refused": [refused(*each) for each in questions["refused"]],
    "development": dict(zip([path for _, path in development], asyncio.run(statuses("auto", development)))),
}))
"""
HERE, THERE = "127.0.0.1", "203.0.113.9"
ROUTES = ("/pause", "/update_weights", "/collective_rpc", "/sleep", "/swarm/attach")
STATUSES = [
    ["auto", [*((THERE, route) for route in ROUTES), (HERE, "/pause"), (HERE, ROUTES[-1]), (THERE, "/v1/completions")]],
    ["swarm", [(HERE, "/v1/completions"), (THERE, "/v1/chat/completions"), (HERE, "/health")]],
]
LORA = {"default_mm_loras": None, "max_loras": 3, "target_modules": ["q_proj"]}
REFUSED = [
    ("", None, ""),
    ("weight_transfer_config", None, "--weight-transfer-config"),
    ("weight_transfer_config.backend", "nccl", "--weight-transfer-config"),
    ("parallel_config.nnodes", 2, "several machines"),
    ("parallel_config.distributed_executor_backend", "ray", "several machines"),
    ("parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
    ("parallel_config.data_parallel_size", 2, "one engine a replica"),
    ("parallel_config.enable_eplb", True, "--enable-eplb"),
    ("lora_config", LORA | {"default_mm_loras": {"image": "mine"}}, "--lora-modules"),
    ("lora_config", LORA | {"max_loras": 2}, "--max-loras"),
    ("lora_config", LORA | {"target_modules": None}, "--lora-target-modules"),
    ("lora_config", LORA | {"target_modules": ["q_proj", "lm_head"]}, "--lora-target-modules"),
    ("lora_config", LORA, ""),
    ("speculative_config", {"draft_model_config": None}, "drafts tokens"),
    ("model_config.logprobs_mode", "raw_logprobs", "--logprobs-mode processed_logprobs"),
    ("model_config.model", "Qwen/Qwen3-8B", "not a folder"),
    ("model_config.tokenizer", "elsewhere", "leave out --tokenizer"),
    ("model_config.hf_overrides", {"rope_theta": 5}, "--hf-overrides"),
    ("args.chat_template", "mine.jinja", "--chat-template"),
]


@pytest.fixture(scope="module")
def answers(python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("model"))
    questions = {"statuses": STATUSES, "refused": [(folder, where, value) for where, value, _ in REFUSED]}
    command = [python, "-c", SCRIPT, json.dumps(questions)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_routes_that_change_weights_answer_this_machine_only(answers):
    # 400: the body names no socket
    assert answers["statuses"][0] == [*[403] * len(ROUTES), 200, 400, 200]


def test_every_development_route_of_this_vllm_answers_this_machine_only(answers):
    assert len(answers["development"]) > 15
    assert set(answers["development"].values()) == {403}, answers["development"]


def test_an_unproven_engine_answers_no_generation_request(answers):
    assert answers["statuses"][1] == [503, 503, 200]


@pytest.mark.parametrize("i", range(len(REFUSED)), ids=[f"{where}={value}" for where, value, _ in REFUSED])
def test_engines_that_cannot_be_updated_exactly_are_refused_in_a_sentence(answers, i: int):
    wanted = REFUSED[i][2]
    assert (answers["refused"][i] == "") == (wanted == "")
    assert wanted in answers["refused"][i]
