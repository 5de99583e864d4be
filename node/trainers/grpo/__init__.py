"""The reference trainer: GRPO in plain torch, on models that fit on a laptop.

It is part of the package because `swarm-node demo` runs it; `examples/reference_grpo.py` is the script to copy. Needs
the `torch` extra.

Modules:

- `cache`: Folders of models that take time to make, kept in the user's cache
- `loop`: The whole RL loop in one process
- `loss`: The GRPO loss
- `online`: The RL loop over a swarm
- `sizes`: The models that the reference trainer comes with
- `small`: The model `small`, 28.3 million parameters, and its task
- `smollm2`: The model `smollm2`, 135 million parameters, and its task
- `task`: What a policy is trained to do: prompts and a scorer
- `tiny`: The model `tiny`, 3.2 million parameters
- `trainer`: Float32 masters, AdamW, and a policy of bf16 bits
- `warmup`: Supervised training, which makes the base models
"""

from node.trainers.grpo.sizes import SIZES, make_trainer
from node.trainers.grpo.task import Task
from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer, SampleGroup, StepStats

__all__ = ["SIZES", "GrpoConfig", "GrpoTrainer", "SampleGroup", "StepStats", "Task", "make_trainer"]
