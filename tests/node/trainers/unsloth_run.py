"""Unsloth's GRPOTrainer, full fine-tuning on a CPU, on the swarm: `unsloth_run.py HOME BASE STEPS OUT LOST STAYS`.

The arguments and the report are those of `trl_grpo_run.py`.
"""

from unsloth import FastLanguageModel  # isort: skip - it replaces classes of trl and transformers

from typing import Any

import torch
from trl_grpo_run import train


def load(base: str) -> tuple[Any, Any]:
    return FastLanguageModel.from_pretrained(
        base, max_seq_length=64, dtype=torch.float32, load_in_4bit=False, full_finetuning=True, fast_inference=False
    )


if __name__ == "__main__":
    train(load)
