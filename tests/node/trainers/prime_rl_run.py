"""Runs prime-rl's own clients: `prime_rl_run.py GATEWAY TOKENIZER MODEL [SOURCE ADMIN BROADCAST [LORA]]`.

The training client of verifiers asks for tokens. With prime-rl's source, its orchestrator's pool also checks the
servers, and has them load the checkpoint in the folder BROADCAST: with LORA, it is an adapter of that name, of which
tokens are then asked for. SAMPLES samples are asked for at a time. LOST, the process of a node, is killed when the
first one has come. Prints JSON on stdout, the samples.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from renderers.configs import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

GATEWAY, TOKENIZER, MODEL, *MORE = sys.argv[1:]
SAMPLES, LOST = int(os.environ["SAMPLES"]), int(os.environ["LOST"])
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, logprobs=True, max_completion_tokens=5, extra_body={"top_k": -1})


async def draw(config: Any, model: str = MODEL) -> list[dict[str, Any]]:
    client = TrainClient(config)
    tasks = [asyncio.create_task(sample(client, model, str(i))) for i in range(SAMPLES)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if LOST:
        os.kill(LOST, signal.SIGKILL)
    found = await asyncio.gather(*tasks)
    await client.close()
    return found


async def sample(client: Any, model: str, session: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "dbca="}]}
    found = await client.get_response(ChatDialect(), body, SAMPLING, session_id=session)
    tokens = found.tokens
    return {
        "prompt": tokens.prompt_ids,
        "drawn": tokens.completion_ids,
        "logprobs": tokens.completion_logprobs,
        "finish_reason": found.finish_reason,
    }


async def update(source: str, admin: str, broadcast: str, lora: str | None = None) -> list[dict[str, Any]]:
    sys.path[:0] = [f"{source}/src", f"{source}/packages/prime-rl-configs/src"]
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.utils.client import InferencePool

    config = ClientConfig(base_url=GATEWAY, admin_base_url=[admin])
    pool = InferencePool(config, MODEL, "renderer", renderer_config=DefaultRendererConfig())
    await pool.wait_for_ready(MODEL, timeout=10)
    await pool.update_weights(Path(broadcast), lora_name=lora, step=1)
    if lora is not None:
        pool.update_model_name(lora)
    again = pool.train_client.model_copy(update={"renderer_model_name": TOKENIZER})
    return await draw(again, pool.model_name)


async def main() -> None:
    config = TrainClientConfig(
        base_url=GATEWAY, api_key_var="NONE", renderer=DefaultRendererConfig(), renderer_model_name=TOKENIZER
    )
    report = await update(*MORE) if MORE else await draw(config)
    print(json.dumps(report))


asyncio.run(main())
