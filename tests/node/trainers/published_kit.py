"""Published RL trainers, in an environment of their own, on a swarm whose nodes generate tokens."""

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scenarios.harness.environments import environment
from scenarios.harness.processes import free_port
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in

HERE = Path(__file__).parent


@contextmanager
def drawing(
    folder: Path, *gateway: str, seed: Sequence[str] = (), names: Sequence[str] = ("node",)
) -> Iterator[tuple[Swarm, Path, str]]:
    """A swarm whose nodes, by `names`, generate tokens, its base folder, and its gateway's URL. `gateway`, `seed`:
    arguments for these."""
    from node.trainers.grpo.tiny import tiny_folder

    base, port = tiny_folder(lambda line: None), free_port()
    with swarm_in(folder, patience_s=STARTED_WITHIN_S) as swarm:
        swarm.seed(base, *seed)
        ticket = swarm.ticket("--nodes", str(len(names)))
        for name in names:
            swarm.start(name, "join", ticket, "--name", name, "--engine", "transformers", "--threads", "1", *LOOPBACK)
        where = ("--home", str(swarm.home("seed")), "--at", f"127.0.0.1:{port}")
        swarm.start("gateway", "gateway", *where, *(word.format(base=base) for word in gateway))
        swarm.until(
            "seed", lambda state: [node["engine"] is not None for node in state["nodes"]] == [True] * len(names)
        )
        yield swarm, base, f"http://127.0.0.1:{port}"


def train(swarm: Swarm, script: str, *words: object) -> dict[str, Any]:
    """Run a script of this folder around such a trainer to its end. Returns the report that it prints last."""
    python = environment("trainers", HERE / "trainers.txt", inherit=True)
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2])}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # several processes import the same large packages
    done = subprocess.run(
        [python, HERE / script, *map(str, words)], env=environ, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:] + swarm.log("gateway")
    return json.loads(done.stdout.strip().splitlines()[-1])
