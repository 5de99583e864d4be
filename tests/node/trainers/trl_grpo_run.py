"""GRPOTrainer as a user writes it, on the swarm: `trl_grpo_run.py HOME BASE STEPS OUT LOST STAYS [ADAPTER]`.

LOST is the process of a node, killed when the first group of the second step has come, and STAYS the home of another.
With ADAPTER it trains a LoRA adapter, which is published under this name. JSON on stdout.
"""

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from node import Swarm
from node.status.query import ask
from node.trainers.trl_rollouts import SwarmRollouts

PROVEN_WITHIN_S = 60.0


def reward_sorted(completions, **_) -> list[float]:
    """The share of neighbouring letters that are in order."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(a <= b for a, b in pairwise(t)) / max(1, len(t) - 1) for t in texts]


class Killing:
    """The swarm's rollouts; kills a node in the middle of the second call, and counts what comes."""

    def __init__(self, swarm: Swarm, lost: int) -> None:
        self.samples: list[dict[str, int]] = []
        """Of each call: how many samples each node drew."""
        self.lags: set[int] = set()
        self._lost, self._rollouts = lost, swarm.rollouts

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        drawn: dict[str, int] = {}
        self.samples.append(drawn)
        for group in self._rollouts(*arguments, **options):
            if len(self.samples) == 2 and not drawn:
                os.kill(self._lost, signal.SIGKILL)
            for sample in group.rollouts:
                self.lags.add(sample.lag)
                drawn[sample.node.hex()] = drawn.get(sample.node.hex(), 0) + 1
            yield group


class Comparing(TrainerCallback):
    """Saves the weights of each step, and waits until the node has proven that its engine runs on the version."""

    def __init__(self, rollouts: SwarmRollouts, out: Path, stays: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._rollouts, self._out, self._stays = rollouts, out, stays

    def on_step_end(self, args, state, control, model=None, **_) -> None:
        publication = self._rollouts.publication.wait(timeout_s=60.0)
        folder = self._out / f"step_{state.global_step}"
        if self._rollouts.adapter is None:
            bits = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
            model.save_pretrained(folder, state_dict=bits)
        root, deadline = publication.root.hex(), time.monotonic() + PROVEN_WITHIN_S
        while (live := ask(self._stays, prove=True).nodes[0].live_root) != root and time.monotonic() < deadline:
            time.sleep(0.1)
        row = {"version": publication.version, "own": publication.adapter_version, "changed": publication.changed}
        self.rows.append(row | {"root": root, "live": live, "folder": str(folder)})


def main() -> None:
    home, base, steps, out, lost, stays, *more = sys.argv[1:]
    adapter = more[0] if more else None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    prompts = [[{"role": "user", "content": p}] for p in ("dbca=", "acbd=", "bdac=", "cadb=")] * 16
    arguments = GRPOConfig(
        output_dir=out, max_steps=int(steps), num_generations=4, max_completion_length=8, temperature=1.0, beta=0.0,
        per_device_train_batch_size=32, gradient_accumulation_steps=1, learning_rate=1e-4, report_to=[], use_cpu=True,
        bf16=False, logging_steps=1, save_strategy="no", model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    with Swarm.attach(home=home, start=False, max_lag=0) as swarm:
        rollouts = SwarmRollouts(swarm, adapter=adapter)
        swarm.rollouts = killing = Killing(swarm, int(lost))
        comparing = Comparing(rollouts, Path(out), Path(stays))
        trainer = GRPOTrainer(
            model=base,
            reward_funcs=reward_sorted,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            rollout_func=rollouts,
            callbacks=[rollouts, comparing],
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]) if adapter else None,
        )
        trainer.train()
    report = {"steps": trainer.state.global_step, "versions": comparing.rows, "samples": killing.samples}
    print(json.dumps(report | {"lags": sorted(killing.lags)}))


if __name__ == "__main__":
    main()
