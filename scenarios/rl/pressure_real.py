"""Back-pressure among real processes on this machine, for `python -m scenarios.rl.pressure --real`.

A seed and a node whose transformers engine has a limited rate (`scenarios.rl.paced`) and counts every token that it
generates. The trainer is this process: it gathers a step's groups from `Swarm.rollouts`, sleeps for the time in which a
trainer of the given speed computes, publishes changed weights, and waits until they are sealed. The node can hold
several times a step's samples, so without back-pressure it would generate for as long as the trainer computes.
"""

import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

from scenarios.harness.swarm import Swarm, swarm_on

__all__ = ["real"]

TOKENS_S: Final = 60.0
"""The node's rate: a few times less than what one core of the test machine generates."""
GROUPS: Final = 4
SAMPLES: Final = 4
TOKENS: Final = 16
"""Length of every sample."""
NODE: Final = "a"
WITHIN_S: Final = 300.0
"""Deadline for a step's groups and for a seal, long enough for a loaded machine."""


def real(trainer: float, steps: int, warm_up: int, max_lag: int) -> dict[str, Any]:
    """Return a row as of `scenarios.rl.pressure`: tokens generated divided by tokens used. `trainer` is the trainer's
    speed divided by its node's."""
    from node.engines.base import SamplingParams
    from node.trainers.api import Swarm as Handle
    from node.trainers.grpo.tiny import TinyRecipe, make_tiny

    recipe = TinyRecipe(letters=3, hidden=64, inner=64, layers=1, heads=2, kv_heads=1, steps=1, rows=4)
    with tempfile.TemporaryDirectory(prefix="rl-pressure-") as name:
        make_tiny(base := Path(name) / "base", recipe, lambda line: None)
        weights, drawn = _weights(base), Path(name) / "drawn"
        train_s = GROUPS * SAMPLES * TOKENS / TOKENS_S / trainer
        with swarm_on(Path(name), base) as swarm:
            paced = {"SCENARIO_TOKENS_S": str(TOKENS_S), "SCENARIO_DRAWN": str(drawn)}
            swarm.engines([NODE], base, module="scenarios.rl.paced_node", **paced)
            with Handle.attach(base=base, home=swarm.home(), start=False, max_lag=max_lag) as handle:
                prompts = ((1, 2, 3 + number % 20) for number in count())
                sampling = SamplingParams(max_tokens=TOKENS)
                groups: Any = handle.rollouts(prompts, SAMPLES, sampling, timeout_s=WITHIN_S)
                marks = []
                for step in range(1, warm_up + steps + 1):
                    worst = max(_lag(handle, next(groups)) for _ in range(GROUPS))
                    time.sleep(train_s)
                    _change(weights, step)
                    handle.publish(weights, step=step).wait(timeout_s=WITHIN_S)
                    marks.append((int(drawn.read_bytes()), worst))
                counters = _counters(swarm)
                groups.close()
    used = steps * GROUPS * SAMPLES * TOKENS
    return {
        "clock": "real",
        "trainer": trainer,
        "max_lag": max_lag,
        "steps": steps,
        "used_tokens": used,
        "drawn_tokens": (found := marks[-1][0] - marks[warm_up - 1][0]),
        "drawn_by_used": found / used,
        "worst_lag": max(lag for _, lag in marks[warm_up:]),
    } | counters


def _lag(handle: Any, group: Any) -> int:
    """Versions between a group's oldest token and the newest sealed version, when the trainer got the group."""
    return handle.head[1] - group.oldest[1]


def _counters(swarm: Swarm) -> dict[str, Any]:
    """Return the status's counters of samples over the whole run."""
    work = swarm.seed_status().work
    return {name: getattr(work, name) for name in ("samples_used", "samples_unused", "unused")}


def _weights(base: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.float() for path in base.glob("*.safetensors") for name, tensor in load_file(path).items()}


def _change(weights: dict[str, Any], step: int) -> None:
    """Change one value in a hundred by enough to change its bf16 bits."""
    for tensor in weights.values():
        tensor.view(-1)[step % 100 :: 100].mul_(1.02)
