"""GRPO of a LoRA adapter, with every rollout drawn by a swarm's nodes.

    swarm-node seed --base BASE                             # and nodes: swarm-node invite, swarm-node join TICKET
    python examples/lora_grpo.py --base BASE --steps 10

The adapter trains on top of the frozen base; what is published is the merged weights, and the model that trains is not
touched. BASE is the folder that the seed was started with, of a Llama, a Qwen, or whatever has q_proj and v_proj.
"""

import argparse
import json
import os
import random
import subprocess
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from node import SamplingParams, Swarm


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint folder of version 0")
    parser.add_argument("--home", type=Path, help="SWARM_HOME of the seed (default: the variable)")
    parser.add_argument("--run-name", default="lora-grpo", help="name of this run, part of each key")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt: a group")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--beta", type=float, default=0.02, help="weight of the KL divergence from the base")
    parser.add_argument("--max-lag", type=int, default=1)
    parser.add_argument("--record", type=Path, help="folder to write each step's samples and adapter to")
    parser.add_argument(
        "--after-step", help="shell command to run when all nodes hold a version; VERSION is set for it"
    )
    return parser.parse_args()


def make_prompts(args: argparse.Namespace, step: int, vocab: int) -> list[list[int]]:
    """The prompts of a step: the same however often they are asked for, as a key wants."""
    chance = random.Random(f"{args.run_name}/{step}")
    return [[chance.randrange(vocab) for _ in range(chance.randint(4, 9))] for _ in range(args.prompts)]


def reward(tokens: tuple[int, ...]) -> float:
    """A task that a tiny model can learn: even tokens."""
    return sum(t % 2 == 0 for t in tokens) / len(tokens)


def logprobs_of(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, given those before it."""
    logits = model(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def group_loss(model: torch.nn.Module, group, beta: float) -> torch.Tensor:
    """GRPO: advantages within the group, clipped ratios to the policy that drew, a KL estimate against the base."""
    width = max(len(r.token_ids) for r in group.rollouts)
    start = len(group.prompt)
    tokens = torch.zeros(len(group.rollouts), start + width, dtype=torch.long)
    drawn = torch.zeros(len(group.rollouts), start + width - 1, dtype=torch.bool)
    old = torch.zeros(len(group.rollouts), start + width - 1)
    for i, rollout in enumerate(group.rollouts):
        end = start + len(rollout.token_ids)
        tokens[i, :end] = torch.tensor([*group.prompt, *rollout.token_ids])
        drawn[i, start - 1 : end - 1] = True
        old[i, start - 1 : end - 1] = torch.tensor(rollout.logprobs)
    device = next(model.parameters()).device
    tokens, drawn, old = tokens.to(device), drawn.to(device), old.to(device)

    rewards = torch.tensor([reward(r.token_ids) for r in group.rollouts], device=device)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    new = logprobs_of(model, tokens)
    with torch.no_grad(), model.disable_adapter():
        reference = logprobs_of(model, tokens)
    ratio = (new - old).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    divergence = (reference - new).exp() - (reference - new) - 1
    return ((beta * divergence - gain) * drawn).sum() / drawn.sum()


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16)
    vocab = model.config.vocab_size
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.lr, weight_decay=0.0)

    with Swarm.attach(model, base=args.base, home=args.home, max_lag=args.max_lag) as swarm:
        for step in range(1, args.steps + 1):
            sampling = SamplingParams(max_tokens=args.max_tokens)
            prompts = make_prompts(args, step, vocab)
            groups, losses = [], []
            for group in swarm.rollouts(prompts, n=args.samples, sampling=sampling, key=f"{args.run_name}/{step}"):
                loss = group_loss(model, group, args.beta) / args.prompts
                loss.backward()  # while the others are drawn
                groups.append(group)
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

            pub = swarm.publish(model, step=step)  # merged beside the model; returns when the weights are copied
            if args.record:
                record(args, groups, step)
                pub.wait()  # sealed, so that it has a number
                model.save_pretrained(args.record / f"adapter-{pub.epoch}.{pub.version}")
            if args.after_step:
                pub.wait(quorum=1.0)  # every live node holds it
                env = os.environ | {"VERSION": f"{pub.epoch}.{pub.version}"}
                subprocess.run(args.after_step, shell=True, check=True, env=env)
            gained = sum(reward(r.token_ids) for g in groups for r in g.rollouts) / (args.prompts * args.samples)
            print(f"step {step} loss {sum(losses):.4f} reward {gained:.3f} density {pub.density}", flush=True)


def record(args: argparse.Namespace, groups: list, step: int) -> None:
    """Everything that the nodes said of this step's samples."""
    args.record.mkdir(parents=True, exist_ok=True)
    said = [
        {"index": g.index, "prompt": g.prompt, "samples": [
            {"tokens": r.token_ids, "logprobs": r.logprobs, "versions": r.versions, "node": r.node.hex()}
            for r in g.rollouts
        ]}
        for g in groups
    ]  # fmt: skip
    (args.record / f"samples-{step}-0.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
