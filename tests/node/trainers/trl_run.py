"""AsyncGRPOTrainer as a user writes it, on the swarm: `trl_run.py HOME BASE GATEWAY STEPS OUT LOST STAYS [ADAPTER]`.

LOST is the process of a node, killed when the first step's weights are to be published, while TRL's rollout worker asks
for samples; STAYS is the home of another. With ADAPTER it trains a LoRA adapter, which is published under this name.
JSON on stdout.
"""

import json
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from datasets import Dataset
from peft import LoraConfig
from recipe_kit import live_roots, root_of
from transformers import AutoTokenizer
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

from node import Swarm
from node.trainers.trl import SwarmWeights


def reward_sorted(completions, **_) -> list[float]:
    """The share of neighbouring letters that are in order."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(a <= b for a, b in pairwise(t)) / max(1, len(t) - 1) for t in texts]


def attention(q, k, v, starts_q, starts_k, longest_q, longest_k, *, softmax_scale, causal, window_size):
    """Computes what the GPU kernel that TRL downloads does: attention over packed sequences, causal from their ends."""
    parts = []
    for i in range(len(starts_q) - 1):
        of_q, of_k = slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])
        rows, columns = of_q.stop - of_q.start, of_k.stop - of_k.start
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[of_q], k[of_k], v[of_k]))
        out = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


class Counting(SwarmWeights):
    """Remembers each publication, and kills the process `lost` before the second one."""

    def __init__(self, swarm: Swarm, lost: int, **options) -> None:
        super().__init__(swarm, **options)
        self.publications = []
        self._lost = lost

    def send_weights(self, iterator) -> None:
        if len(self.publications) == 1:
            os.kill(self._lost, signal.SIGKILL)
        super().send_weights(iterator)
        self.publications.append(self.publication)


def main() -> None:
    home, base, url, steps, out, lost, stays, *more = sys.argv[1:]
    adapter = more[0] if more else None
    torch.set_num_threads(1)
    # TRL requires that vLLM can be imported, although its worker only speaks HTTP. It cannot be imported here.
    async_rollout_worker.is_vllm_available = lambda *_: True
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it needs a GPU's name
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)  # it is a kernel for GPUs
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {"content": "text"}}}
    prompts = ["dbca=", "acbd=", "bdac=", "cadb="] * 8
    arguments = AsyncGRPOConfig(
        output_dir=out, vllm_server_base_url=url, max_steps=int(steps), num_generations=4, max_completion_length=8,
        per_device_train_batch_size=8, gradient_accumulation_steps=1, learning_rate=1e-4, token_budget=256,
        weight_sync_steps=1, max_staleness=4, temperature=1.0, report_to=[], use_cpu=True, logging_steps=1,
        dtype="float32", save_strategy="no", bf16=False,
    )  # fmt: skip
    with Swarm.attach(home=home, start=False) as swarm:
        weights = Counting(swarm, int(lost), adapter=adapter, quorum=1.0)
        trainer = AsyncGRPOTrainer(
            model=base,
            reward_funcs=reward_sorted,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": p}] for p in prompts]}),
            processing_class=tokenizer,
            weight_transfer=weights,
            peft_config=adapter and LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"]),
        )
        if adapter:
            weights.follow(trainer)
        trainer.train()
        accepted = swarm.state["work"]["accepted"] if "accepted" in swarm.state.get("work", {}) else None
    rows = [
        {"version": p.version, "own": p.adapter_version, "density": p.density, "changed": p.changed}
        for p in weights.publications
    ]
    root = weights.publications[-1].root.hex()
    report = {"steps": trainer.state.global_step, "publications": rows, "accepted": accepted, "root": root}
    report["live"] = live_roots(Path(stays), int(steps), root, adapter=adapter is not None)
    if adapter is None:
        report["want"] = root_of(Path(base), trainer.model.state_dict(), Path(out) / "trained")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
