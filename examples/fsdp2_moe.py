"""Policy gradients on a mixture of experts under FSDP2, with every rollout drawn by a swarm's nodes.

    swarm-node keygen; swarm-node seed --base BASE          # and nodes: swarm-node invite, swarm-node join TICKET
    torchrun --nproc-per-node 2 examples/fsdp2_moe.py --base BASE --steps 10

Each rank asks for rollouts of its own prompts, under a key of its own, and trains float32 masters in bfloat16. BASE is
the folder that the seed was started with: any model of transformers' auto classes, for example Qwen3-MoE.
"""

import argparse
import json
import os
import random
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from node import SamplingParams, Swarm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint folder of version 0")
    parser.add_argument("--home", type=Path, help="SWARM_HOME of the seed (default: the variable)")
    parser.add_argument("--run-name", default="fsdp2-moe", help="name of this run, part of each key")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of each rank in each step")
    parser.add_argument("--samples", type=int, default=4, help="samples of each prompt")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--record", type=Path, help="folder to write each step's samples and weights to")
    parser.add_argument(
        "--after-step", help="shell command to run when all nodes hold a version; VERSION is set for it"
    )
    return parser.parse_args()


def make_prompts(args: argparse.Namespace, step: int, rank: int, vocab: int) -> list[list[int]]:
    """This rank's prompts of this step: the same however often they are asked for, as a key wants."""
    chance = random.Random(f"{args.run_name}/{step}/{rank}")
    return [[chance.randrange(vocab) for _ in range(chance.randint(4, 9))] for _ in range(args.prompts)]


def reward(tokens: tuple[int, ...]) -> float:
    """A task that a tiny model can learn: even tokens."""
    return sum(t % 2 == 0 for t in tokens) / len(tokens)


def pack(groups: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of prompt and completion, padded: tokens, which of them were drawn, their log-probabilities, advantages."""
    rows = [(g.prompt, r) for g in groups for r in g.rollouts]
    width = max(len(p) + len(r.token_ids) for p, r in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    drawn = torch.zeros(len(rows), width, dtype=torch.bool)
    old = torch.zeros(len(rows), width)
    for i, (prompt, rollout) in enumerate(rows):
        end = len(prompt) + len(rollout.token_ids)
        tokens[i, :end] = torch.tensor([*prompt, *rollout.token_ids])
        drawn[i, len(prompt) : end] = True
        old[i, len(prompt) : end] = torch.tensor(rollout.logprobs)
    rewards = torch.tensor([[reward(r.token_ids) for r in g.rollouts] for g in groups])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return tokens, drawn, old, advantages.flatten()


def loss_of(model: torch.nn.Module, tokens, drawn, old, advantages) -> torch.Tensor:
    """The clipped ratio to the policy that drew; padding is at the end, where a causal model does not see it."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    new = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    ratio = (new - old[:, 1:]).exp()
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    return -(gain * drawn[:, 1:]).sum() / drawn.sum()


def describe(groups: list) -> list[dict]:
    """Everything that the nodes said of their samples, for --record."""
    return [
        {"index": g.index, "prompt": g.prompt, "samples": [
            {"tokens": r.token_ids, "logprobs": r.logprobs, "versions": r.versions, "node": r.node.hex()}
            for r in g.rollouts
        ]}
        for g in groups
    ]  # fmt: skip


def name_of(pub) -> str:
    """A version as people write it: epoch.number."""
    return f"{pub.epoch}.{pub.version}"


def save_weights(args: argparse.Namespace, model: torch.nn.Module, folder: Path) -> None:
    """The weights as a checkpoint of the base's dtype, by torch and transformers alone. A collective."""
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        whole = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32)
        whole.load_state_dict(full)
        whole.to(torch.bfloat16).save_pretrained(folder)


def main() -> None:
    args = parse()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32).to(device)  # masters
    vocab = model.config.vocab_size
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    with Swarm.attach(model, base=args.base, home=args.home, max_lag=args.max_lag) as swarm:  # every rank
        for step in range(1, args.steps + 1):
            sampling = SamplingParams(max_tokens=args.max_tokens)
            prompts = make_prompts(args, step, rank, vocab)
            groups = list(
                swarm.rollouts(prompts, n=args.samples, sampling=sampling, key=f"{args.run_name}/{step}/{rank}")
            )
            if args.record:
                args.record.mkdir(parents=True, exist_ok=True)
                (args.record / f"samples-{step}-{rank}.json").write_text(json.dumps(describe(groups)))

            tokens, drawn, old, advantages = (x.to(device) for x in pack(groups))
            loss = loss_of(model, tokens, drawn, old, advantages)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            pub = swarm.publish(model, step=step)  # every rank; returns when the weights are copied
            if args.record:
                pub.wait()  # sealed, so that it has a number
                save_weights(args, model, args.record / f"weights-{name_of(pub)}")
            if args.after_step:
                pub.wait(quorum=1.0)  # every live node holds it
                if rank == 0:
                    subprocess.run(args.after_step, shell=True, check=True, env=os.environ | {"VERSION": name_of(pub)})
                dist.barrier()  # nothing newer is published meanwhile
            if rank == 0:
                gained = sum(reward(r.token_ids) for g in groups for r in g.rollouts) / (args.prompts * args.samples)
                print(f"step {step} loss {loss.item():.4f} reward {gained:.3f} density {pub.density}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
