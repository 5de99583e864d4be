"""The reference trainer: GRPO in plain torch on models that fit a laptop.

`loss` (the formula), `task` (prompts and scorer), `trainer` (masters, optimizer, policy bits), `loop` (all in one
process), `sizes` (the models: `tiny`, `small`, `smollm2`). Needs the `torch` extra.
"""

from node.trainers.grpo.sizes import SIZES, make_trainer
from node.trainers.grpo.task import Task
from node.trainers.grpo.trainer import Group, GrpoConfig, GrpoTrainer, StepStats

__all__ = ["SIZES", "Group", "GrpoConfig", "GrpoTrainer", "StepStats", "Task", "make_trainer"]
