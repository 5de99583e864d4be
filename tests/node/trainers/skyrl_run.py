"""Three steps of training as SkyRL does them, on the swarm: HOME CONTROL GATEWAY BASE OUT LOST STAYS.

SkyRL's own client asks for samples, and its own delta engine publishes the versions. `recipe_kit.Policy` stands in for
SkyRL's workers, which need GPUs. The process LOST, a node, is killed when the first sample of the second step has come;
STAYS: the home of another. Prints JSON.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from recipe_kit import MAX_TOKENS, SAMPLES, Policy, live_roots, prompt_ids, root_of, rows_of
from transformers import AutoTokenizer

from node.status.query import ask

STEPS = 3
SAMPLING = {
    "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True, "max_tokens": MAX_TOKENS,
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None,
}  # fmt: skip
"""As SkyRL's `get_vllm_sampling_params` makes them."""


def stand_in(name: str, **attributes: Any) -> ModuleType:
    module = sys.modules[name] = ModuleType(name)
    vars(module).update(attributes)
    return module


def import_skyrl() -> tuple[Any, Any, Any]:
    """SkyRL's client of inference servers, its client of their control endpoints, and its module of delta engines.

    Their packages are not initialised, since that imports much that nothing here calls; nor is vLLM, of which the
    delta engine uses two small base classes.
    """
    root = find_spec("skyrl").submodule_search_locations[0]
    rooms = "", ".inference_servers", ".weight_sync", ".weight_sync.delta", ".utils", ".distributed"
    for name in ("", ".utils", ".backends", *(f".backends.skyrl_train{r}" for r in (*rooms, ".distributed.megatron"))):
        stand_in(f"skyrl{name}").__path__ = [f"{root}{name.replace('.', '/')}"]

    @dataclass
    class InitInfo:
        rank: int = field(kw_only=True)
        is_sender = property(lambda self: self.rank == 0)

    class Engine(Generic[TypeVar("Info")]):
        def __init__(self, *, client: Any, source: Any, is_sender: bool) -> None:
            self.client, self.source, self.is_sender = client, source, is_sender

    stand_in("pybase64")
    stand_in("skyrl.utils.log", logger=logging.getLogger())
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        stand_in(name).__path__ = []
    stand_in("vllm.distributed.weight_transfer.packed_tensor", DEFAULT_PACKED_BUFFER_SIZE_BYTES=0)
    stand_in("vllm.distributed.weight_transfer.base", TrainerInitInfo=InitInfo, TrainerWeightTransferEngine=Engine,
             VLLMWeightSyncClient=object, WeightSource=object)  # fmt: skip
    train = "skyrl.backends.skyrl_train"
    return (
        import_module(f"{train}.inference_servers.remote_inference_client").RemoteInferenceClient,
        import_module(f"{train}.weight_sync.control_plane").SkyrlWeightSyncClient,
        import_module(f"{train}.weight_sync.delta.trainer"),
    )


class Weights:
    """A `WeightSource`: the tensors of `policy`, each time that they are sent."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._policy.tensors.items())


async def main() -> None:
    home, control, gateway, base, out, lost, stays = sys.argv[1:]
    torch.set_num_threads(1)
    client_of, control_of, delta = import_skyrl()
    policy = Policy(Path(base))
    client = client_of(
        proxy_url=gateway, server_urls=[control], data_parallel_size=1, model_name=base,
        tokenizer=AutoTokenizer.from_pretrained(base),
    )  # fmt: skip
    assert await client.get_world_size() == (1, 1)
    info = delta.DeltaTrainerInitInfo(
        base_model_path=base, sync_dir=out, local_checkpoint_dir=f"{out}/local", publish_staging_dir=f"{out}/staging",
        publish_num_workers=1, rank=0,
    )  # fmt: skip
    engine = await asyncio.to_thread(
        delta.DeltaTrainerWeightTransferEngine.trainer_init, info, client=control_of([control]), source=Weights(policy)
    )
    engine.skyrl_set_reset_prefix_cache(True)

    async def generate(prompt: list[int]) -> list[int]:
        salt = f"{base}@{client.weight_version}"
        found = await client.generate(
            {"prompt_token_ids": [prompt], "sampling_params": SAMPLING, "cache_salt": salt, "session_ids": ["1"]}
        )
        assert len(found["response_logprobs"][0]) == len(found["response_ids"][0])
        return found["response_ids"][0]

    prompts, versions, drawn = prompt_ids(), [], []
    for step in range(1, STEPS + 1):
        samples = [asyncio.create_task(generate(prompt)) for prompt in prompts for _ in range(SAMPLES)]
        await asyncio.wait(samples, return_when=asyncio.FIRST_COMPLETED)
        if step == 2:
            os.kill(int(lost), signal.SIGKILL)
        tokens = await asyncio.gather(*samples)
        drawn.append(sum(1 <= len(one) <= MAX_TOKENS for one in tokens))
        groups = [tokens[i : i + SAMPLES] for i in range(0, len(tokens), SAMPLES)]
        policy.step([row for prompt, group in zip(prompts, groups, strict=True) for row in rows_of(prompt, group)])
        await asyncio.to_thread(engine.send_weights)
        client.increment_weight_version()
        root = ask(Path(home)).root
        want = root_of(Path(base), policy.tensors, Path(out) / f"step_{step}")
        versions.append({"root": root, "want": want, "live": live_roots(Path(stays), step, root)})
    await client.teardown()
    print(json.dumps({"versions": versions, "drawn": drawn}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
