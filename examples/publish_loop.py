"""The three lines that make a training loop a publisher: attach, publish, and rollouts from the swarm.

    swarm-node keygen; swarm-node seed --base BASE          # and nodes: swarm-node invite, swarm-node join TICKET
    python examples/publish_loop.py --base BASE --steps 3

BASE is the folder that the seed was started with. The "training" is a small random change of one tensor; put your own
optimizer step in its place.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from node import SamplingParams, Swarm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="checkpoint folder of version 0")
    parser.add_argument("--home", type=Path, help="SWARM_HOME of the seed (default: the variable)")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16)
    prompts = [[1, 2, 3], [4, 5, 6]]
    with Swarm.attach(model, base=args.base, home=args.home) as swarm:  # 1
        for step in range(1, args.steps + 1):
            for group in swarm.rollouts(prompts, n=2, sampling=SamplingParams(max_tokens=8)):  # 2
                print(f"step {step} prompt {group.index}: {[rollout.token_ids for rollout in group.rollouts]}")
            with torch.no_grad():  # your optimizer.step()
                next(model.parameters()).mul_(1.01)
            pub = swarm.publish(model, step=step)  # 3: returns when the weights are copied
        pub.wait()  # only for the numbers: close() waits for the last version too
        print(f"version {pub.epoch}.{pub.version}: {pub.bytes} bytes for {pub.density:.2%} of the elements", flush=True)


if __name__ == "__main__":
    main()
