"""What an axolotl configuration names of the swarm: the function that draws samples, a plugin, prompts, a reward.

SWARM_RUN has the words of `axolotl_run.py`: HOME BASE STEPS OUT LOST STAYS.
"""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from recipe_kit import Killing, reward_sorted
from trl_grpo_run import Comparing

from node import Swarm
from node.trainers.trl_rollouts import SwarmRollouts

__all__ = ["Publishing", "as_prompts", "comparing", "killing", "reward_sorted", "rollouts"]

home, base, steps, out, lost, stays = shlex.split(os.environ["SWARM_RUN"])
swarm = Swarm.attach(home=home, start=False, max_lag=0)
rollouts = SwarmRollouts(swarm)
swarm.rollouts = killing = Killing(swarm, int(lost))
comparing = Comparing(rollouts, Path(base), Path(out), Path(stays))


class Publishing(BasePlugin):
    """Adds the callbacks."""

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return [rollouts, comparing]


def as_prompts(cfg: Any, *_: Any, **__: Any) -> tuple[Callable[..., dict[str, Any]], dict[str, Any]]:
    """The transformation of a row of the data set."""

    def of_row(row: dict[str, str], tokenizer: Any = None) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": row["text"]}]}

    return of_row, {"remove_columns": ["text"]}
