"""Whether a policy trained through the swarm is bit for bit the one trained in one process.

Real, synchronous GRPO (`node.trainers.grpo`) runs twice: with an engine in the trainer's own process that gets all
weights after each step, without delta and replica; and through a real swarm on loopback, with a seed and nodes that
each have an engine process. Each group is one batch, every process has one thread, and sampling is seeded by version
and group. After each step, the root of the trainer's own bits and that of the published version are compared with the
first run's. At the end the bits read back from every engine are compared too.

    python -m scenarios.rl.fidelity                       # 100 steps of tiny, two nodes: some minutes on 2 cores
    python -m scenarios.rl.fidelity --steps 10 --kill 4   # a node is killed in step 4, and the bits stay the same

With `--kill`, other nodes generate the killed node's groups again as a whole, and get the same tokens.
"""

import json
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from node.engines.base import Prompt
from node.ledger.messages import stream_of
from node.status.progress import ProgressLine
from scenarios.harness.command import json_parser, run_as_program
from scenarios.harness.swarm import Swarm, swarm_on

KEY: Final = "fidelity"
SETTLE_S: Final = 60.0


def in_process(base: Path, trainer: Any, steps: int, progress: ProgressLine) -> list[str]:
    """Return the state root after each step, with an engine that gets the weights directly."""
    from node.engines.transformers import TransformersEngine
    from node.trainers.grpo.loop import sample_group
    from node.trainers.grpo.online import policy_root, session_name
    from node.trainers.rollouts import group_id

    engine = TransformersEngine(threads=1, device="cpu")
    engine.load(base)
    engine.attach(trainer.layout)

    def draw(step: int, i: int, prompt: tuple[int, ...]) -> Any:
        group = group_id(session_name(KEY, step), i)
        asked = [Prompt(prompt, stream_of(group, sample), sample == 0) for sample in range(trainer.config.samples)]
        return sample_group(prompt, engine.generate(asked, trainer.sampling(step)))

    roots: list[str] = []
    for step in range(1, steps + 1):
        progress.label = f"In one process: step {step} of {steps}"
        trainer.step([draw(step, i, prompt) for i, prompt in enumerate(trainer.prompts(step))])
        engine.reload(dict(trainer.policy_bits()).__getitem__, (0, step), b"")
        roots.append(policy_root(trainer).hex())
    return roots


def through_the_swarm(
    base: Path, trainer: Any, steps: int, nodes: int, kill: int | None, progress: ProgressLine
) -> dict[str, Any]:
    """Return the steps as the swarm's trainer saw them, and the roots of the engines' bits at the end."""
    from node.trainers.api import Swarm as Handle
    from node.trainers.grpo.online import policy_root, train_online

    names = [f"node{i + 1}" for i in range(nodes)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rl-fidelity-") as folder, swarm_on(Path(folder), base) as swarm:
        progress.label = "Starting the swarm"
        swarm.engines(names, base, "--engine", "transformers", "--threads", "1")
        killer: threading.Thread | None = None

        def begins(step: int) -> None:
            nonlocal killer
            progress.label = f"Through the swarm: step {step} of {steps}"
            if step == kill:
                killer = threading.Thread(target=_kill_when_busy, args=(swarm, names.pop()))
                killer.start()

        with Handle.attach(base=base, home=swarm.home(), max_lag=0, start=False) as handle:
            for row, publication in train_online(trainer, handle, steps, begins=begins, key=KEY):
                if killer is not None:
                    killer.join()
                root = b"" if publication.root is None else publication.root
                rows.append(row | {"root": root.hex(), "own_root": policy_root(trainer).hex()})
        engines = _proven(swarm, names, rows[-1]["root"]) if rows else {}
        work = swarm.seed_status().work
    return {"rows": rows, "engines": engines, "accepted": work.accepted, "refused": work.refused}


def _kill_when_busy(swarm: Swarm, name: str) -> None:
    """Kill the node as soon as it has work, or after two seconds without any."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        if any(node.name == name and node.outstanding for node in swarm.seed_status().nodes):
            break
    swarm.kill(name)


def _proven(swarm: Swarm, names: Sequence[str], root: str) -> dict[str, str]:
    """Return the root of each engine's live parameters, once all have the last version or the time is over."""
    deadline = time.monotonic() + SETTLE_S
    found: dict[str, str] = {}
    while time.monotonic() < deadline:
        found = {name: swarm.own_status(name, prove=True).live_root or "" for name in names}
        if set(found.values()) == {root}:
            break
        time.sleep(0.2)
    return found


def compare(
    base: Path, trainers: Sequence[Any], steps: int, *, nodes: int = 2, kill: int | None = None
) -> dict[str, Any]:
    """Run both, with two equal trainers, and return the comparison."""
    import torch

    torch.set_num_threads(1)
    with ProgressLine("Training") as progress:
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
    """Return whether no step and no engine differed."""
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
    parser = json_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default 100)")
    parser.add_argument("--nodes", type=int, default=2, help="rollout nodes (default 2)")
    parser.add_argument("--kill", type=int, metavar="STEP", help="kill a node in this step")
    parser.add_argument("--size", default="tiny", help="tiny (default), small or smollm2")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and samples (default 0)")
    options = parser.parse_args(arguments)
    if options.steps < 1 or options.nodes < 1 + (options.kill is not None):
        parser.error("--steps and --nodes: at least 1; with --kill at least 2 nodes")
    from node.trainers.grpo.sizes import make_trainer

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    trained = [make_trainer(options.size, seed=options.seed, lr=None, progress=say, device="cpu") for _ in range(2)]
    result = compare(
        trained[0][0], [trainer for _, trainer in trained], options.steps, nodes=options.nodes, kill=options.kill
    )
    print(json.dumps(result) if options.json else _table(result))
    return 0 if identical(result) else 1


if __name__ == "__main__":
    run_as_program(main)
