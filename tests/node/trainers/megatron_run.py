"""A GPT model of Megatron-core, two tensor-parallel ranks, on the swarm: HOME BASE STEPS OUT LOST STAYS, on each rank.

Rank 0 writes OUT/report.json. LOST and STAYS: as for `trl_grpo_run.py`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from recipe_kit import Killing, draw, live_roots, policy_loss, root_of
from transformers import AutoModelForCausalLM

from node import Swarm
from node.trainers.gathered import publish_from_rank_0
from node.trainers.megatron import checkpoint_tensors

torch.cuda.current_device = lambda: "cpu"  # Megatron names the device of new tensors by it


def megatron_model(base: Any) -> GPTModel:
    """The model of transformers in Megatron's modules, this rank's part of it."""
    config, weights = base.config, base.state_dict()
    model = GPTModel(
        TransformerConfig(
            num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, kv_channels=config.head_dim,
            ffn_hidden_size=config.intermediate_size, num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_key_value_heads, normalization="RMSNorm", qk_layernorm=True,
            layernorm_epsilon=config.rms_norm_eps, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True,
            tensor_model_parallel_size=dist.get_world_size(), bias_activation_fusion=False, masked_softmax_fusion=False,
            apply_rope_fusion=False, bias_dropout_fusion=False, gradient_accumulation_fusion=False,
        ),
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"), vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings, parallel_output=False, position_embedding_type="rope",
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        rotary_base=config.rope_parameters["rope_theta"],
    )  # fmt: skip
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = _whole(name, weights, config)
            dim = getattr(parameter, "partition_dim", -1)
            if not getattr(parameter, "tensor_model_parallel", False):
                parameter.copy_(whole)
            elif "linear_fc1" in name:
                parameter.copy_(torch.cat([half.chunk(world)[rank] for half in whole.chunk(2)]))
            else:
                parameter.copy_(whole.chunk(world, dim)[rank])
    return model


def _whole(name: str, weights: dict[str, torch.Tensor], config: Any) -> torch.Tensor:
    """Megatron's parameter `name`, undivided, of the weights of transformers."""
    if name == "embedding.word_embeddings.weight":
        return weights["model.embed_tokens.weight"]
    if name == "decoder.final_layernorm.weight":
        return weights["model.norm.weight"]
    _, _, layer, inner = name.split(".", 3)
    own = {n.split(".", 3)[3]: t for n, t in weights.items() if n.startswith(f"model.layers.{layer}.")}
    if inner == "mlp.linear_fc1.weight":
        return torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]])
    if inner == "self_attention.linear_qkv.weight":
        heads = [own[f"self_attn.{part}_proj.weight"].view(-1, config.head_dim, config.hidden_size) for part in "qkv"]
        groups = zip(*(part.chunk(config.num_key_value_heads) for part in heads), strict=True)
        return torch.cat([torch.cat(group) for group in groups]).view(-1, config.hidden_size)
    return own[
        {
            "input_layernorm.weight": "input_layernorm.weight",
            "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
            "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        }[inner]
    ]


def logits(model: GPTModel, ids: torch.Tensor) -> torch.Tensor:
    width = ids.shape[1]
    places = torch.arange(width)[None].expand_as(ids)
    later = ~torch.ones(width, width, dtype=torch.bool).tril()[None, None]
    return model(ids, places, later)


def main() -> None:
    home, base, steps, out, lost, stays = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(0, inference_rng_tracker=True)  # a tracker that asks no GPU for its state
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = megatron_model(theirs)
    ids = torch.randint(0, theirs.config.vocab_size, (4, 12), generator=torch.Generator().manual_seed(0))

    def off(tensors: dict[str, torch.Tensor]) -> float:
        """The largest difference of logits between transformers, with these weights, and Megatron."""
        with torch.no_grad():
            theirs.load_state_dict(tensors)
            return (theirs(ids).logits - logits(model, ids)).abs().max().item()

    first = off(theirs.state_dict())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4)
    swarm = Swarm.attach(home=home, start=False, max_lag=0) if rank == 0 else None
    if swarm is not None:
        swarm.rollouts = killing = Killing(swarm, int(lost))
    versions = []
    for step in range(1, int(steps) + 1):
        rows = draw(swarm)
        adam.zero_grad()
        policy_loss(lambda ids: logits(model, ids), rows).backward()
        for name, parameter in model.named_parameters():
            if "q_layernorm" in name or "k_layernorm" in name:  # each rank has seen its own heads
                dist.all_reduce(parameter.grad)
        adam.step()
        exported = dict(checkpoint_tensors(model, theirs.config.vocab_size))
        tied = {"lm_head.weight": exported["model.embed_tokens.weight"]}
        difference = off(exported | tied)
        tensors = checkpoint_tensors(model, theirs.config.vocab_size)
        publication = publish_from_rank_0(swarm, tensors, step=step)
        if publication is not None:
            root = publication.wait(timeout_s=60.0).root.hex()
            want = root_of(Path(base), exported, Path(out) / f"step_{step}")
            live = live_roots(Path(stays), step, root)
            versions.append({"version": publication.version, "changed": publication.changed, "root": root,
                             "want": want, "live": live, "logits": difference})  # fmt: skip
        dist.barrier()
    if swarm is not None:
        report = {"first": first, "versions": versions, "samples": killing.samples, "lags": sorted(killing.lags)}
        (Path(out) / "report.json").write_text(json.dumps(report))
        swarm.close()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
