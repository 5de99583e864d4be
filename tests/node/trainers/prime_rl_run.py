"""Runs prime-rl's own clients of inference servers: `prime_rl_run.py GATEWAY TOKENIZER MODEL [SOURCE ADMIN BROADCAST]`.

The training client of verifiers asks for tokens. With prime-rl's source, its orchestrator's pool also checks the
servers, and has them load the checkpoint in the folder BROADCAST. Prints JSON on stdout.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from renderers.configs import DefaultRendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

GATEWAY, TOKENIZER, MODEL, *MORE = sys.argv[1:]
SAMPLING = SamplingConfig(temperature=1.0, top_p=1.0, logprobs=True, max_completion_tokens=5, extra_body={"top_k": -1})


async def draw(config: Any) -> dict[str, Any]:
    client = TrainClient(config)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "dbca="}]}
    found = await client.get_response(ChatDialect(), body, SAMPLING, session_id="one")
    await client.close()
    tokens = found.tokens
    return {
        "prompt": tokens.prompt_ids,
        "drawn": tokens.completion_ids,
        "logprobs": tokens.completion_logprobs,
        "finish_reason": found.finish_reason,
    }


async def update(source: str, admin: str, broadcast: str) -> dict[str, Any]:
    sys.path[:0] = [f"{source}/src", f"{source}/packages/prime-rl-configs/src"]
    from prime_rl.configs.shared import ClientConfig
    from prime_rl.utils.client import InferencePool

    config = ClientConfig(base_url=GATEWAY, admin_base_url=[admin])
    pool = InferencePool(config, MODEL, "renderer", renderer_config=DefaultRendererConfig())
    await pool.wait_for_ready(MODEL, timeout=10)
    await pool.update_weights(Path(broadcast), step=1)
    again = pool.train_client.model_copy(update={"renderer_model_name": TOKENIZER})
    return await draw(again)


async def main() -> None:
    config = TrainClientConfig(
        base_url=GATEWAY, api_key_var="NONE", renderer=DefaultRendererConfig(), renderer_model_name=TOKENIZER
    )
    report = await update(*MORE) if MORE else await draw(config)
    print(json.dumps(report))


asyncio.run(main())
