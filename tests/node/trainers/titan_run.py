"""Three steps of torchtitan's RL loop on the swarm: HOME GATEWAY BASE OUT LOST STAYS TENSOR_PARALLEL.

Its `Controller` runs, and its `PolicyTrainer` trains on two ranks, each in a process of Monarch: as two shards of
FSDP2, or with TENSOR_PARALLEL 2. Three things are of this file, because a CPU lacks them: the name of the device, the
kernel of `VarlenAttention`, and the sum of gradients with a factor, which gloo lacks. LOST, a node's process, is
killed when the first sample of the second step has come; STAYS: the home of another. Prints JSON.
"""
# ruff: noqa: E402 - torchtitan looks for a GPU when it is imported

import asyncio
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

from monarch.actor import this_host
from recipe_kit import PROMPTS, SAMPLES, live_roots, prompt_ids, reward_of, root_of
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, Configurable, ParallelismConfig, TrainingConfig
from torchtitan.experiments.rl.actors.generator import SamplingConfig, VLLMGenerator
from torchtitan.experiments.rl.actors.trainer import PolicyTrainer
from torchtitan.experiments.rl.components.batcher import BatchConfig, Batcher
from torchtitan.experiments.rl.controller import AsyncLoopConfig, ValidationConfig
from torchtitan.experiments.rl.environment import MessageEnv
from torchtitan.experiments.rl.losses import GRPOLoss
from torchtitan.experiments.rl.renderer import RendererConfig
from torchtitan.experiments.rl.rollout import Rollout, RolloutGroup
from torchtitan.experiments.rl.rollout.rollouter import Rollouter
from torchtitan.experiments.rl.rollout.types import RolloutStatus, RolloutTurn
from torchtitan.experiments.rl.rubrics import Rubric
from torchtitan.experiments.rl.types import RolloutTurnID
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.qwen3 import (
    _EMBEDDING_SKIP_INIT,
    _LINEAR_INIT,
    Qwen3Model,
    _build_qwen3_layers,
    _qwen3_norm,
    parallelize_qwen3,
)
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from transformers import AutoConfig

from node.status.query import ask
from node.trainers.torchtitan import SwarmController

STEPS, RANKS, WIDTH, MAX_TOKENS = 3, 2, 64, 8


class EagerAttention(VarlenAttention):
    """What the kernel computes: causal attention within each document of a packed row."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(
        self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, scale: float | None = None, **_: Any
    ) -> Any:
        rows, width, _, size = v_BLNH.shape
        places = torch.arange(rows * width)
        document = torch.searchsorted(attention_masks.cu_seq_q, places, right=True)
        seen = (document[:, None] == document) & (places[:, None] >= places)
        q, k, v = (x.reshape(rows * width, -1, x.shape[-1]).transpose(0, 1)[None] for x in (q_BLNH, k_BLNH, v_BLNH))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(rows, width, -1, size)


class Nothing(Configurable):
    """A dataset of nothing: `Sorting` has its own prompts."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass


class Sorting(Rollouter):
    """The prompts, rewards and samples of `recipe_kit`. Kills a node, and looks at what the others hold."""

    @dataclass(kw_only=True, slots=True)
    class Config(Rollouter.Config):
        train_dataset: Configurable.Config = field(default_factory=Nothing.Config)
        validation_dataset: Configurable.Config = field(default_factory=Nothing.Config)
        rubric: Rubric.Config = field(default_factory=lambda: Rubric.Config(reward_fns=[]))
        message_env: MessageEnv.Config = field(default_factory=MessageEnv.Config)

    def __init__(self, config: Config) -> None:
        self._prompts = cycle(prompt_ids())
        self._advantages = config.advantage.build()
        self._one_looks = asyncio.Lock()
        home, _, _, _, lost, stays, _ = sys.argv[1:]
        self._home, self._lost, self._stays = Path(home), int(lost), Path(stays)
        self.versions: list[dict[str, Any]] = []
        self.drawn = [0] * STEPS
        self.drawn_at: list[set[int]] = [set() for _ in range(STEPS)]

    def get_training_sample(self) -> list[int]:
        return next(self._prompts)

    async def look(self, published: int) -> None:
        """Note, once, the version that became of step `published`."""
        async with self._one_looks:
            if len(self.versions) < published:
                root = ask(self._home).root
                live = await asyncio.to_thread(live_roots, self._stays, published, root)
                self.versions.append({"root": root, "live": live})

    async def run_group_rollouts(
        self, *, generate_fn: Any, sample: Any, group_id: int, group_size: int, sampling: Any, renderer: Any
    ) -> RolloutGroup:
        step = group_id // len(PROMPTS)
        if step >= STEPS:
            await asyncio.Event().wait()  # of a step that is not trained any more
        if step:
            await self.look(step)
        rollouts = await asyncio.gather(
            *(self._one(generate_fn, sample, RolloutTurnID(group_id, i, 0), sampling, step) for i in range(group_size))
        )
        group = RolloutGroup(group_id=group_id, rollouts=rollouts)
        for rollout, advantage in zip(rollouts, self._advantages(group), strict=True):
            rollout.advantage = advantage
        return group

    async def _one(self, generate: Any, prompt: list[int], name: RolloutTurnID, sampling: Any, step: int) -> Rollout:
        done = await generate(
            prompt, request_id=name.to_string(), routing_session_id=name.to_string(include_turn=False),
            sampling_config=sampling,
        )  # fmt: skip
        if step == 1 and self._lost:
            os.kill(self._lost, signal.SIGKILL)
            self._lost = 0
        self.drawn[step] += 1
        self.drawn_at[step] |= {done.min_policy_version, done.max_policy_version}
        turn = RolloutTurn(
            rollout_id=name, prompt_token_ids=prompt, completion_token_ids=done.token_ids,
            completion_logprobs=done.token_logprobs, min_policy_version=done.min_policy_version,
            max_policy_version=done.max_policy_version,
        )  # fmt: skip
        return Rollout(
            group_id=name.group_id, rollout_id=name.rollout_id, turns=[turn], status=RolloutStatus.COMPLETED,
            reward=reward_of(done.token_ids, name.rollout_id),
        )  # fmt: skip


def parallelized(model: Any, **more: Any) -> Any:
    """torchtitan's way, for gloo: it has no sum of products."""
    model = parallelize_qwen3(model, **more)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def model_spec(base: Path) -> ModelSpec:
    """torchtitan's Qwen3 in the sizes of a checkpoint."""
    has = AutoConfig.from_pretrained(base)
    rope = CosSinRoPE.Config(dim=has.head_dim, max_seq_len=WIDTH, theta=has.rope_parameters["rope_theta"])
    layers = _build_qwen3_layers(
        n_layers=has.num_hidden_layers, dim=has.hidden_size, n_heads=has.num_attention_heads,
        n_kv_heads=has.num_key_value_heads, head_dim=has.head_dim, hidden_dim=has.intermediate_size,
        attn_backend="varlen", rope=rope,
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = EagerAttention.Config()
    embedding = Embedding.Config(
        num_embeddings=has.vocab_size, embedding_dim=has.hidden_size, param_init=_EMBEDDING_SKIP_INIT
    )
    head = Linear.Config(in_features=has.hidden_size, out_features=has.vocab_size, param_init=_LINEAR_INIT)
    config = Qwen3Model.Config(
        vocab_size=has.vocab_size, dim=has.hidden_size, norm=_qwen3_norm(has.hidden_size), tok_embeddings=embedding,
        lm_head=head, layers=layers, enable_weight_tying=True,
    )  # fmt: skip
    return ModelSpec(
        name="qwen3", flavor="tiny", model=config, parallelize_fn=parallelized, pipelining_fn=None,
        post_optimizer_build_fn=None, state_dict_adapter=Qwen3StateDictAdapter,
    )  # fmt: skip


def experiment(gateway: str, base: Path, out: Path, tensor_parallel: int) -> SwarmController.Config:
    return SwarmController.Config(
        gateway=gateway,
        model_spec=model_spec(base),
        hf_assets_path=str(base),
        dump_folder=str(out),
        async_loop=AsyncLoopConfig(
            num_training_steps=STEPS,
            num_prompts_per_train_step=len(PROMPTS),
            num_samples_per_prompt=SAMPLES,
            target_offpolicy_steps=0,
            validation=ValidationConfig(num_samples=0),
            batcher=Batcher.Config(batch=BatchConfig(local_batch_size=4, seq_len=WIDTH)),
        ),
        compile=CompileConfig(enable=False),
        rollouter=Sorting.Config(),
        renderer=RendererConfig(name="default"),
        trainer=PolicyTrainer.Config(
            optimizer=default_adamw(lr=1e-4),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=ParallelismConfig(
                data_parallel_shard_degree=RANKS // tensor_parallel,
                tensor_parallel_degree=tensor_parallel,
                spmd_backend="partial_dtensor",
            ),
            checkpoint=CheckpointManager.Config(
                enable=True, initial_load_in_hf=True, interval=1, last_save_model_only=False
            ),
            loss=GRPOLoss.Config(),
        ),
        generator=VLLMGenerator.Config(
            checkpoint=CheckpointManager.Config(enable=False),
            sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=MAX_TOKENS),
        ),
    )


def saved_root(base: Path, out: Path, step: int) -> str:
    """The root of what torchtitan itself has saved after a step, under the names of its own conversion."""
    file = out / f"step_{step}.pt"
    dcp_to_torch_save(out / "checkpoint" / f"step-{step}", file)
    saved = torch.load(file, weights_only=False)
    weights = {name: value for name, value in saved.items() if isinstance(value, torch.Tensor)}
    named = Qwen3StateDictAdapter(model_spec(base).model, str(base)).to_hf(weights)
    return root_of(base, named, out / f"step_{step}")


def preload() -> None:
    """Import this module first in a process of Monarch: it names the device."""


async def train() -> None:
    _, gateway, base, out, _, _, tensor_parallel = sys.argv[1:]
    controller = experiment(gateway, Path(base), Path(out), int(tensor_parallel)).build()
    trainer = this_host().spawn_procs(per_host={"gpus": RANKS}, bootstrap=preload)
    generator = this_host().spawn_procs(per_host={"gpus": 1}, bootstrap=preload)
    await controller.setup_async(trainer_mesh=trainer, generator_meshes=[generator])
    await controller.run()
    rollouts = controller._rollouter
    await rollouts.look(STEPS)
    for step, row in enumerate(rollouts.versions, 1):
        row["want"] = saved_root(Path(base), Path(out), step)
    report = {"versions": rollouts.versions, "drawn": rollouts.drawn, "drawn_at": list(map(sorted, rollouts.drawn_at))}
    await controller.close()
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    import titan_run  # by its name, under which the processes of Monarch know it

    asyncio.run(titan_run.train())
