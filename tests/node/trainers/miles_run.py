"""Three steps of training as miles does them, on the swarm: HOME ENGINE BASE OUT LOST STAYS, as for `slime_run.py`.

A GPT model of Megatron-core trains. With MILES_SOURCE, miles' own `generate_rollout`, `SGLangEngine` and
`UpdateWeightFromDiskDelta`, from a clone, ask for samples, control the engine, and gather, convert and write that
model's weights. Without, `Written` does the same. Ray, SGLang and miles' triton kernels are replaced: nothing here
calls more of them than `ray.get`.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron_run import logits, megatron_model
from recipe_kit import Row, policy_loss
from slime_run import Own, Written, main
from transformers import AutoModelForCausalLM

from node.trainers.megatron import checkpoint_tensors


class Policy:
    """A model of Megatron-core in float32, and the bfloat16 one that miles publishes."""

    newest: "Policy"

    def __init__(self, base: Path) -> None:
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)  # a tracker that asks no GPU for its state
        theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.config = theirs.config
        self._model, half = megatron_model(theirs), megatron_model(theirs)
        half.config.bf16 = True
        self.published = Float16Module(half.config, half)
        """As miles holds its model, in the names that its conversion reads."""
        for parameter in self.published.parameters():  # as Megatron's `get_model` does, which asks for a GPU
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        self._adam = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        Policy.newest = self

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Of the checkpoint, by this project's conversion of the model as Megatron's `get_model` returns it."""
        return dict(checkpoint_tensors([self.published], self.config.vocab_size))

    def step(self, rows: Sequence[Row]) -> None:
        """An optimizer step."""
        self._adam.zero_grad()
        policy_loss(lambda ids: logits(self._model, ids), rows).backward()
        self._adam.step()
        for rounded, exact in zip(self.published.parameters(), self._model.parameters(), strict=True):
            rounded.data = exact.detach().to(torch.bfloat16)  # new memory: miles keeps what it has read, not a copy


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that need a GPU or a cluster, and those in them. Each has an empty class by every name."""

    MODULES = ("ray", "sglang", "sglang_router", "miles.utils.fp8_kernel")

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        absent = any(f"{name}.".startswith(f"{module}.") for module in self.MODULES)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class Empty(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Handle:
    """In place of a Ray actor's handle: a call is made at once."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self._actor, name))


class MilesOwn(Own):
    """miles' own functions."""

    PACKAGE = "miles"

    def writer(self) -> Any:
        sys.path.insert(0, os.environ["MILES_SOURCE"])
        sys.meta_path.insert(0, Absent())
        import ray
        import sglang.srt.debug_utils.dumper
        import sglang.srt.server_args
        import sglang_router

        ray.get = lambda answers: answers
        sglang_router.__version__ = "0.3.2"
        sglang.srt.debug_utils.dumper.DumperConfig = SimpleNamespace(_kv_pairs_to_dict=lambda pairs: {})
        names = "host port nnodes node_rank gpu_id_step base_gpu_id tp_size dp_size pp_size ep_size enable_memory_saver"
        sglang.srt.server_args.ServerArgs = make_dataclass("ServerArgs", names.split())
        self.module("utils.distributed_utils").init_gloo_group()
        parallel = self.module("backends.training_utils.parallel")
        alone = self.module("utils.ft_utils.process_group_utils").GroupInfo(rank=0, size=1, group=dist.group.WORLD)
        groups = ("intra_dp", "intra_dp_cp", "cp", "tp", "pp", "ep", "etp", "indep_dp")
        parallel.set_parallel_state(parallel.ParallelState(**dict.fromkeys(groups, alone)))
        update = self.module("backends.megatron_utils.update_weight.update_weight_from_distributed.delta")
        policy = Policy.newest
        vars(self.args).update(
            num_attention_heads=policy.config.num_attention_heads, num_query_groups=policy.config.num_key_value_heads,
            kv_channels=policy.config.head_dim, hidden_size=policy.config.hidden_size, swiglu=True,
            vocab_size=policy.config.vocab_size,
        )  # fmt: skip
        writer = update.UpdateWeightFromDiskDelta(
            self.args, [policy.published], dict, model_name="qwen3forcausallm", quantization_config=None
        )
        writer.connect_rollout_engines([Handle(self._connected())], None)
        return writer

    def publish(self, tensors: dict[str, torch.Tensor]) -> None:
        self._writer.update_weights()

    def _connected(self) -> Any:
        """miles' actor of the engine, once it has found that the engine is as it wants one."""
        kind = self.module("backends.sglang_utils.sglang_engine").SGLangEngine
        actor, where = kind(self.args, rank=0, base_gpu_id=0, num_gpus_per_engine=1), httpx.URL(self._engine)
        actor.init(dist_init_addr=f"{where.host}:{where.port}", nccl_port=None, host=where.host, port=where.port)
        assert actor.health_generate()
        return actor


if __name__ == "__main__":
    main(
        MilesOwn if os.environ.get("MILES_SOURCE") else Written, Policy, rollout_external=True, rollout_num_gpus=1,
        rollout_num_gpus_per_engine=1, num_gpus_per_node=8, eval_num_gpus=0, seed=0, sglang_dp_size=1,
        sglang_pp_size=1, sglang_ep_size=1, offload_rollout=False, pause_generation_mode="retract",
        update_weight_buffer_size=1 << 20, lora_rank=0,
    )  # fmt: skip
