"""torchtitan's RL loop on the swarm, without a change to it: its trainer publishes, and its rollouts ask the gateway.

    from node.trainers.torchtitan import SwarmController

    def my_experiment():                       # in the module of --module, in place of Controller.Config
        return SwarmController.Config(gateway="http://127.0.0.1:8000", hf_assets_path="Qwen/dir", ...)

The seed is found by SWARM_HOME, on the host of the trainer's rank 0. For torchtitan 0.3.0: its own loop runs, and its
own trainer trains.
"""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from monarch.actor import concurrent_endpoint, current_rank, this_host  # pyright: ignore[reportMissingImports]
from monarch.spmd import setup_torch_elastic_env_async  # pyright: ignore[reportMissingImports]
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer  # pyright: ignore[reportMissingImports]
from torchtitan.experiments.rl.controller import Controller  # pyright: ignore[reportMissingImports]
from torchtitan.experiments.rl.routing.inter_generator_router import (  # pyright: ignore[reportMissingImports]
    InterGeneratorRouter,
)

from node.trainers.api import Swarm
from node.trainers.gathered import publish_from_rank_0, whole_tensors
from node.trainers.torchtitan_generator import SwarmGenerator

__all__ = ["SwarmController", "SwarmTrainer", "checkpoint_tensors"]

SEALED_WITHIN_S: Final = 600.0
"""Time limit for each wait."""


def checkpoint_tensors(model: Any, adapter: Any) -> Iterator[tuple[str, Any]]:
    """(checkpoint name, whole tensor) of a torchtitan model. `adapter`: its `StateDictAdapter`.

    Every rank iterates to the end: one layer is gathered at a time, and then converted as torchtitan converts
    checkpoints.
    """
    for _, layer in groupby(model.state_dict().items(), key=lambda item: item[0].split(".")[:2]):
        yield from adapter.to_hf(dict(whole_tensors(dict(layer)))).items()


class SwarmTrainer(PolicyTrainer):
    """torchtitan's trainer. Its weights go to the swarm, not to TorchStore."""

    _swarm: Swarm | None = None

    @concurrent_endpoint
    async def push_model_state_dict(self) -> None:
        """Publish the weights, and return when the version is sealed. Nothing but that wait lets the trainer go on.

        Raises what `Swarm.attach`, `Swarm.publish` and `Publication.wait` raise.
        """
        if current_rank().rank == 0 and self._swarm is None:
            self._swarm = Swarm.attach(start=False)
        tensors = checkpoint_tensors(self.model, self.sd_adapter)
        publication = publish_from_rank_0(self._swarm, tensors, step=self.policy_version, timeout_s=SEALED_WITHIN_S)
        if publication is not None:
            await asyncio.to_thread(publication.wait, timeout_s=SEALED_WITHIN_S)


class SwarmController(Controller):
    """torchtitan's controller, with `SwarmTrainer`, and a `SwarmGenerator` in each generator's place."""

    @dataclass(kw_only=True, slots=True)
    class Config(Controller.Config):
        gateway: str = "http://127.0.0.1:8000"
        """URL of `swarm-node gateway`, without /v1."""
        api_key: str = field(default="", repr=False)
        """One of the gateway's keys; by default that of SWARM_API_KEY, or none."""

    async def setup_async(self, *, trainer_mesh: Any, generator_meshes: list[Any]) -> None:
        """As the parent's, without TorchStore and engines. Raises what the trainer's endpoints raise."""
        config, parallelism = self.config, self.config.trainer.parallelism
        shards = max(parallelism.data_parallel_shard_degree, 1)
        self.trainer_dp_degree = parallelism.data_parallel_replicate_degree * shards
        router_mesh = this_host().spawn_procs(per_host={"cpus": 1})
        self._proc_meshes = [router_mesh, trainer_mesh, *generator_meshes]
        await setup_torch_elastic_env_async(trainer_mesh)
        self.trainer = trainer_mesh.spawn(
            "trainer", SwarmTrainer, config.trainer, model_spec=config.model_spec, compile_config=config.compile,
            hf_assets_path=config.hf_assets_path, generator_dtype=config.generator.model_dtype,
            output_dir=config.dump_folder,
        )  # fmt: skip
        key = config.api_key or os.environ.get("SWARM_API_KEY", "")
        generators = [
            mesh.spawn(f"generator_{i}", SwarmGenerator, config.gateway, key) for i, mesh in enumerate(generator_meshes)
        ]
        self.generator_router = router_mesh.spawn(
            "generator_router", InterGeneratorRouter, config.generator_router, generators=generators
        )
        self.start_step = self._get_rank_0_value(await self.trainer.get_policy_version.call())
        await self.trainer.push_model_state_dict.call()
        await self.generator_router.pull_model_state_dict.call_one(self.start_step)
