"""GRPOTrainer as a user writes it, on the swarm: `trl_grpo_run.py HOME BASE STEPS OUT LOST STAYS [ADAPTER]`.

LOST is the process of a node, killed when the first group of the second step has come, and STAYS the home of another.
With ADAPTER it trains a LoRA adapter, which is published under this name. JSON on stdout.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from recipe_kit import Killing, live_roots, reward_sorted, root_of
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from node import Swarm
from node.trainers.trl_rollouts import SwarmRollouts


class Comparing(TrainerCallback):
    """Notes the root of the weights after each step, and of those that the engine of a node proves that it runs on."""

    def __init__(self, rollouts: SwarmRollouts, base: Path, out: Path, stays: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self._rollouts, self._base, self._out, self._stays = rollouts, base, out, stays

    def on_step_end(self, args, state, control, model=None, **_) -> None:
        publication = self._rollouts.publication.wait(timeout_s=60.0)
        root = publication.root.hex()
        row = {"version": publication.version, "own": publication.adapter_version, "changed": publication.changed}
        adapter = self._rollouts.adapter is not None
        if not adapter:
            row["want"] = root_of(self._base, model.state_dict(), self._out / f"step_{state.global_step}")
        live = live_roots(self._stays, state.global_step, root, adapter=adapter)
        self.rows.append(row | {"root": root, "live": live})


def train(load: Callable[[str], tuple[Any, Any]] = lambda base: (base, AutoTokenizer.from_pretrained(base))) -> None:
    """Train, and print the report. `load(base)`: the trainer's model, and the tokenizer."""
    home, base, steps, out, lost, stays, *more = sys.argv[1:]
    adapter = more[0] if more else None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    prompts = [[{"role": "user", "content": p}] for p in ("dbca=", "acbd=", "bdac=", "cadb=")] * 16
    named = isinstance(model, str)
    arguments = GRPOConfig(
        output_dir=out, max_steps=int(steps), num_generations=4, max_completion_length=8, temperature=1.0, beta=0.0,
        per_device_train_batch_size=32, gradient_accumulation_steps=1, learning_rate=1e-4, report_to=[], use_cpu=True,
        bf16=False, logging_steps=1, save_strategy="no", model_init_kwargs={"dtype": "float32"} if named else None,
    )  # fmt: skip
    with Swarm.attach(home=home, start=False, max_lag=0) as swarm:
        rollouts = SwarmRollouts(swarm, adapter=adapter)
        swarm.rollouts = killing = Killing(swarm, int(lost))
        comparing = Comparing(rollouts, Path(base), Path(out), Path(stays))
        trainer = GRPOTrainer(
            model=model,
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
    train()
