"""Faults among real processes on this machine, for `python -m scenarios.rl.faults --real`.

A seed and five nodes, each with a transformers engine in its own process with a limited rate (`scenarios.rl.paced`).
One node lies from the start, one is killed (SIGKILL, with its engine) in the second step, and one is stopped (SIGSTOP)
in the third. None is replaced, so a step's time is compared with what the remaining honest nodes can do.
"""

import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any, Final

from node.status.schema import OwnStatus, WorkerStatus, to_plain
from scenarios.harness.swarm import Swarm, swarm_on

__all__ = ["TOKENS_S", "real"]

TOKENS_S: Final = 60.0
"""Rate of every node: a few times less than what one core of the test machine generates."""
STEPS: Final = 5
GROUPS: Final = 24
SAMPLES: Final = 4
TOKENS: Final = 32
CHECKED: Final = 0.25
HONEST: Final = ("a", "b", "c", "d")
LIAR: Final = "liar"


def real() -> dict[str, Any]:
    """Run the scenario. Returns the steps with their times, and the tokens that each node lost."""
    from node.engines.base import SamplingParams
    from node.trainers.api import Swarm as Handle
    from node.trainers.grpo.tiny import TinyRecipe, make_tiny

    recipe = TinyRecipe(letters=3, hidden=64, inner=64, layers=1, heads=2, kv_heads=1, steps=1, rows=4)
    with tempfile.TemporaryDirectory(prefix="rl-faults-") as name:
        make_tiny(base := Path(name) / "base", recipe, lambda line: None)
        options = ("--check-share", str(CHECKED))
        with swarm_on(Path(name), base, seed_words=options) as swarm:
            module, rate = "scenarios.rl.paced_node", {"SCENARIO_TOKENS_S": str(TOKENS_S)}
            swarm.engines(HONEST, base, module=module, **rate)
            swarm.engines([LIAR], base, module=module, SCENARIO_LIES="1", **rate)
            with Handle.attach(base=base, home=swarm.home(), start=False) as handle:
                prompts = ((1, 2, 3 + number % 20) for number in count())
                groups = handle.rollouts(prompts, SAMPLES, SamplingParams(max_tokens=TOKENS))
                rows = [_step(swarm, groups, number) for number in range(STEPS)]
                groups.close()
            return _result(swarm, rows)


def _step(swarm: Swarm, groups: Any, number: int) -> dict[str, Any]:
    """Take a step's groups; a node fails in the second step and another in the third."""
    began = time.monotonic()
    seen: set[int] = set()
    for taken in range(GROUPS):
        if taken == GROUPS // 4 and number == 1:
            swarm.kill(HONEST[0])
        if taken == GROUPS // 4 and number == 2:
            swarm.pause(HONEST[1])
        seen.add(next(groups).index)
    honest = len(HONEST) - (number >= 1) - (number >= 2)
    return {
        "seconds": time.monotonic() - began,
        "expected_s": GROUPS * SAMPLES * TOKENS / (honest * TOKENS_S),
        "groups": len(seen),
    }


def _result(swarm: Swarm, rows: list[dict[str, Any]]) -> dict[str, Any]:
    status = swarm.seed_status()
    liars = [node for node in status.nodes if node.name == LIAR]
    for row in rows:
        row["ratio"] = row["seconds"] / row["expected_s"]
    return {
        "clock": "real",
        "steps": rows,
        "lost_by_the_honest": {name: _lost_tokens(swarm.own_status(name)) for name in HONEST[2:]},
        "liar_aside": any(liar.quarantine is not None for liar in liars),
        "accepted": status.work.accepted,
        "refused": status.work.refused,
        "checks": to_plain(status.work.checks),
    }


def _lost_tokens(node: OwnStatus) -> int:
    assert isinstance(node.work, WorkerStatus)
    return node.work.lost_tokens
