"""Runs verl's own classes on the swarm, in a Ray cluster of this process: `verl_run.py HOME BASE GATEWAY LOST STAYS`.

verl's code moves the weights and asks for tokens. Its training needs GPUs and is left out: in its place `Engine`
changes bits. LOST, a node's process, is killed when the first sample of the first version has come; STAYS is the home
of another. Prints JSON on stdout.
"""
# ruff: noqa: E402 - verl reads the environment when it is imported

import asyncio
import inspect
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOME, BASE, URL, LOST, STAYS = sys.argv[1:]
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "node.trainers.verl", "SWARM_HOME": HOME}

import ray
import torch
from hydra import compose, initialize_config_module
from recipe_kit import live_roots
from safetensors.torch import load_file, save_file
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from codec import Checkpoint, Replica
from codec.errors import UsageError

STEPS, PROMPT, SAMPLES = 2, [1, 2, 3, 4], 16
OVERRIDES = [
    "trainer.v1.trainer_mode=separate_async",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.rollout.name=swarm",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=swarm",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=node.trainers.verl",
    f"+actor_rollout_ref.rollout.engine_kwargs.swarm.url={URL}",
    "+actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.swarm.quorum=1.0",
    # usually as many replicas as there are nodes
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
]


class Engine:
    """In place of FSDP: the base's tensors, some bits of which change before each gathering."""

    def __init__(self) -> None:
        self.weights = load_file(Path(BASE) / "model.safetensors")
        self.gathered = self.steps = 0

    def get_per_tensor_param(self, **_: Any):
        for tensor in self.weights.values():
            tensor.view(torch.int16).flatten()[self.steps :: 7] ^= 1
        self.steps += 1
        return self._gather(), None

    def _gather(self):
        for name, tensor in self.weights.items():
            self.gathered += 1
            yield name, tensor


class Actor(Worker):
    """A training worker with verl's own methods for weights, and a checkpoint engine made as verl makes it."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.actor = SimpleNamespace(engine=Engine())
        options = omega_conf_to_dataclass(config.rollout.checkpoint_engine)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            options.backend, is_master=self.rank == 0, bucket_size=1 << 20, **options.engine_kwargs[options.backend]
        )

    update_weights = ActorRolloutRefWorker.update_weights
    execute_checkpoint_engine = ActorRolloutRefWorker.execute_checkpoint_engine

    def gathered(self) -> int:
        return self.actor.engine.gathered

    def root(self, folder: str) -> str:
        """The root of what this rank holds, saved in `folder`."""
        shutil.copytree(BASE, folder)
        save_file(self.actor.engine.weights, Path(folder) / "model.safetensors")
        return Replica.from_checkpoint(Checkpoint.open(Path(folder)), Checkpoint.open(Path(BASE)).layout).root.hex()


def check_implements(base: type, ours: type) -> None:
    """Every abstract method of the base class is implemented, and can be called as the base's can."""
    for name in base.__abstractmethods__:
        theirs, mine = (inspect.signature(getattr(cls, name)).parameters for cls in (base, ours))
        open_ended = any(p.kind is p.VAR_KEYWORD for p in mine.values())
        for parameter in theirs.values():
            assert parameter.name in mine or open_ended, (name, parameter.name)
        assert all(p.name in theirs or p.default is not p.empty for p in mine.values()), name
        assert inspect.iscoroutinefunction(getattr(base, name)) <= (
            inspect.iscoroutinefunction(getattr(ours, name)) or inspect.isasyncgenfunction(getattr(ours, name))
        ), name
    assert not ours.__abstractmethods__


async def ask(client: Any, **more: Any) -> dict[str, Any]:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    found = await client.generate("a request", prompt_ids=PROMPT, sampling_params=sampling | more)
    return found.model_dump()


async def samples_of_a_swarm_that_loses_a_node(client: Any) -> int:
    """How many samples came."""
    tasks = [asyncio.create_task(ask(client)) for _ in range(SAMPLES)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    os.kill(int(LOST), signal.SIGKILL)
    return sum(len(found["token_ids"]) > 0 for found in await asyncio.gather(*tasks))


async def refusal(client: Any, **asked: Any) -> str:
    try:
        return str(await client.generate("a request", **asked))
    except UsageError as error:
        return str(error)


async def main(folder: str) -> None:
    check_implements(CheckpointEngine, CheckpointEngineRegistry.get("swarm"))
    check_implements(RolloutReplica, RolloutReplicaRegistry.get("swarm"))
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", OVERRIDES)
    rollout = config.actor_rollout_ref.rollout
    # a resource pool asks for many CPUs, and does not use them
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    group = RayWorkerGroup(
        resource_pool=RayResourcePool([2], use_gpu=False),
        ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Actor), config=config.actor_rollout_ref),
        use_gpu=False, device_name="cpu",
    )  # fmt: skip
    servers = await LLMServerManager.create(config=config)
    checkpoints = CheckpointEngineManager(
        config=omega_conf_to_dataclass(rollout.checkpoint_engine), actor_wg=group, replicas=servers.get_replicas()
    )
    metrics, live, want, drawn = [], [], [], 0
    for step in range(1, STEPS + 1):
        metrics.append(await checkpoints.update_weights(global_steps=step))
        want.append(await group.workers[0].root.remote(f"{folder}/step_{step}"))
        live.append(await asyncio.to_thread(live_roots, Path(STAYS), step, want[-1]))
        if step == 1:
            drawn = await samples_of_a_swarm_that_loses_a_node(servers.get_client())
    plain = await ask(servers.get_client())
    partial = await ask(servers.get_client(client_cls=FullyAsyncLLMServerClient), max_tokens=5)
    report = {
        "replicas": len(servers.get_replicas()),
        "metrics": metrics,
        "want": want,
        "live": live,
        "drawn": drawn,
        "gathered": [await worker.gathered.remote() for worker in group.workers],
        "refused": await refusal(servers.get_client(), prompt_ids=PROMPT, sampling_params={"guided_grammar": "x"}),
        "image": await refusal(servers.get_client(), prompt_ids=PROMPT, sampling_params={}, image_data=["one"]),
        "plain": plain,
        "partial": partial,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as short:  # the paths of its sockets are long
        try:
            asyncio.run(main(short))
        finally:
            ray.shutdown()
