"""Is a policy that trains through the swarm, bit for bit, the one that trains in one process?

Real GRPO (`node.trainers.grpo`), synchronous, twice: with an engine in the trainer's own process that is handed every
bit anew after each step, no delta, no replica; and through a real swarm, a seed and nodes with an engine process each
on loopback. One group is one batch, one thread each, sampling seeded by version and group. After each step the state
root of the trainer's own bits and that of the published version are held against the first run's; at the end so are the
bits that are read back out of every engine.

    python -m scenarios.rl.fidelity                       # 100 steps of tiny, two nodes: some minutes on 2 cores
    python -m scenarios.rl.fidelity --steps 10 --kill 4   # a node is killed in step 4, and the bits stay the same

With `--kill`, groups of the dead node are drawn again, whole, by the others: with the tokens that they would have had.
"""

import argparse
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from codec.errors import UsageError
from node.engines.base import Completion, Prompt
from node.ledger.messages import stream_of
from node.status.progress import Progress
from scenarios.harness.processes import Swarm, swarm_on

KEY: Final = "fidelity"
SETTLE_S: Final = 60.0


def in_process(base: Path, trainer: Any, steps: int, progress: Progress) -> list[str]:
    """The state roots after each step, with an engine that is given the weights directly."""
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo.online import policy_root, session_name
    from node.trainers.grpo.trainer import Group
    from node.trainers.rollouts import group_id

    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(base)
    engine.attach(trainer.layout)

    def draw(step: int, i: int, prompt: tuple[int, ...]) -> tuple[Completion, ...]:
        group = group_id(session_name(KEY, step), i)
        asked = [Prompt(prompt, stream_of(group, sample)) for sample in range(trainer.config.samples)]
        return tuple(engine.generate(asked, trainer.sampling(step)))

    roots: list[str] = []
    for step in range(1, steps + 1):
        progress.label = f"In one process: step {step} of {steps}"
        trainer.step([Group(prompt, draw(step, i, prompt)) for i, prompt in enumerate(trainer.prompts(step))])
        engine.reload(dict(trainer.policy_bits()).__getitem__, (0, step), b"")
        roots.append(policy_root(trainer).hex())
    return roots


def through_the_swarm(
    base: Path, trainer: Any, steps: int, nodes: int, kill: int | None, progress: Progress
) -> dict[str, Any]:
    """Each step as the swarm's trainer saw it, and what the engines held at the end."""
    from node.trainers.api import Swarm as Handle
    from node.trainers.grpo.online import policy_root, train_online

    names = [f"node{i + 1}" for i in range(nodes)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rl-fidelity-") as folder, swarm_on(Path(folder), base) as swarm:
        progress.label = "Starting the swarm"
        swarm.nodes(names, base, "--engine", "transformers", "--threads", "1")
        killer: threading.Thread | None = None

        def begins(step: int) -> None:
            nonlocal killer
            progress.label = f"Through the swarm: step {step} of {steps}"
            if step == kill:
                killer = threading.Thread(target=_kill_when_busy, args=(swarm, names.pop()))
                killer.start()

        with Handle.attach(base=base, home=swarm.home, max_lag=0, start=False) as handle:
            for row, publication in train_online(trainer, handle, steps, begins=begins, key=KEY):
                if killer is not None:
                    killer.join()
                root = b"" if publication.root is None else publication.root
                rows.append(row | {"root": root.hex(), "own_root": policy_root(trainer).hex()})
        engines = _proven(swarm, names, rows[-1]["root"]) if rows else {}
        work = swarm.status().work
    return {"rows": rows, "engines": engines, "accepted": work.accepted, "refused": work.refused}


def _kill_when_busy(swarm: Swarm, name: str) -> None:
    """SIGKILL as soon as it has work, or soon after the others had all of it."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        if any(node.name == name and node.outstanding for node in swarm.status().nodes):
            break
    swarm.signal(name, signal.SIGKILL)


def _proven(swarm: Swarm, names: Sequence[str], root: str) -> dict[str, str]:
    """The root that each engine's live parameters add up to, once it says that it holds the last version."""
    deadline = time.monotonic() + SETTLE_S
    found: dict[str, str] = {}
    while time.monotonic() < deadline:
        found = {name: swarm.node(name, prove=True).live_root or "" for name in names}
        if set(found.values()) == {root}:
            break
        time.sleep(0.2)
    return found


def compare(
    base: Path, trainers: Sequence[Any], steps: int, *, nodes: int = 2, kill: int | None = None
) -> dict[str, Any]:
    """Both runs, of two equal trainers; see `report` for what is said of them."""
    import torch

    torch.set_num_threads(1)
    with Progress("Training") as progress:
        began = time.monotonic()
        expected = in_process(base, trainers[0], steps, progress)
        alone_s = time.monotonic() - began
        found = through_the_swarm(base, trainers[1], steps, nodes, kill, progress)
    rows = found["rows"]
    equal = [row["root"] == row["own_root"] == root for row, root in zip(rows, expected, strict=True)]
    return {
        "scenario": "rl_fidelity",
        "steps": steps,
        "nodes": nodes,
        "killed_in_step": kill,
        "identical_steps": sum(equal),
        "first_difference": equal.index(False) + 1 if False in equal else None,
        "engines_identical": bool(rows) and set(found["engines"].values()) == {expected[-1]},
        "engines": found["engines"],
        "different_roots": len(set(expected)),
        "density": [row["density"] for row in rows],
        "reward": [row["reward"] for row in rows],
        "lag": max((row["lag"] for row in rows), default=0),
        "rollouts": sum(row["rollouts"] for row in rows),
        "accepted": found["accepted"],
        "refused": found["refused"],
        "step_s": [row["sample_s"] + row["train_s"] + row["copy_s"] for row in rows],
        "alone_s": alone_s,
        "roots": expected,
    }


def identical(result: dict[str, Any]) -> bool:
    """Nothing differed: at no step, in no engine."""
    return result["identical_steps"] == result["steps"] and result["engines_identical"] and result["lag"] == 0


def _table(result: dict[str, Any]) -> str:
    steps = result["steps"]
    lines = [
        f"steps                                    {steps}",
        f"trainer's own and published root equal   {result['identical_steps']} of {steps}"
        + ("" if result["first_difference"] is None else f", first different: {result['first_difference']}"),
        f"bits in the engines at the end           {'equal' if result['engines_identical'] else 'DIFFERENT'}"
        f" ({len(result['engines'])} nodes)",
        f"changed a step                           {sum(result['density']) / max(1, steps):.2%}"
        f" ({result['different_roots']} different roots)",
        f"reward, first and last step              {result['reward'][0]:.2f}, {result['reward'][-1]:.2f}",
        f"samples wanted, accepted, refused        {result['rollouts']}, {result['accepted']}, {result['refused']}",
    ]
    if result["killed_in_step"] is not None:
        lines.append(f"a node was killed in step                {result['killed_in_step']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--nodes", type=int, default=2, help="rollout nodes (default 2)")
    parser.add_argument("--kill", type=int, metavar="STEP", help="kill a node in this step")
    parser.add_argument("--size", default="tiny", help="tiny (default), small or smollm2")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and samples (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.nodes < 1 + (options.kill is not None):
        parser.error("--steps and --nodes: at least 1; with --kill at least 2 nodes")
    from node.trainers.grpo.sizes import make_trainer

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    made = [make_trainer(options.size, seed=options.seed, lr=None, progress=say, device="cpu") for _ in range(2)]
    result = compare(
        made[0][0], [trainer for _, trainer in made], options.steps, nodes=options.nodes, kill=options.kill
    )
    print(json.dumps(result) if options.json else _table(result))
    return 0 if identical(result) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
