"""Processes of an older commit and of this one in the same swarm: the wire and the files on disk have not changed.

The old code is the last commit before modules moved into rooms. It is unpacked from the repository's history, and runs
in this environment with its own folder first on the path.
"""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from kit import all_hold, checkpoint, holds, root_of, step, weights

from node.host.port import free_port
from scenarios.harness.swarm import LOOPBACK, Swarm, swarm_in

pytestmark = [pytest.mark.slow, pytest.mark.long]  # long: it needs the history, which a shallow clone lacks

HOUSE = Path(__file__).parents[2]
OLD = "6b4749e7fba8cc7ba327b1465bf33e6ca4b6209a"
PACKAGES = ("codec", "swarm", "node")
WITHIN_S = 180.0
"""Time limit in seconds of a command that may compile kernels, which each of the two versions does for itself."""

Environment = dict[str, str]


def git(*words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["git", "-C", str(HOUSE), *words], capture_output=True, check=False)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment in which `python -m node.cli` is the old code."""
    if git("rev-parse", "--git-dir").returncode != 0:
        pytest.skip("not a git repository: the old code comes from its history")
    if git("cat-file", "-e", f"{OLD}^{{commit}}").returncode != 0:
        pytest.skip(f"the history lacks {OLD[:7]}, the old code (a shallow clone?): git fetch --unshallow")
    folder = tmp_path_factory.mktemp("old-code")
    packed = git("archive", OLD, *PACKAGES)
    assert packed.returncode == 0, packed.stderr.decode()
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    # Without PYTHONSAFEPATH the working directory, which is this repository, would come before PYTHONPATH.
    environment = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}
    program = "import codec, swarm, node; print(codec.__file__, swarm.__file__, node.__file__)"
    shown = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    assert all(path.startswith(str(folder)) for path in shown.stdout.split()), shown.stdout
    return environment


def run_command(swarm: Swarm, *words: str, **environment: str) -> Any:
    """Run a command in the seed's home, with the old code if `environment` says so. Returns its JSON output."""
    ended = swarm.command("seed", *words, "--json", within_s=WITHIN_S, **environment)
    assert ended.code == 0, f"{ended} {swarm.logs()}"
    return json.loads(ended.out)


def test_old_and_new_processes_work_in_one_swarm(tmp_path: Path, old: Environment) -> None:
    versions = [weights(tensors=12, elements=500_000)]
    for number in range(1, 5):
        versions.append(step(versions[-1], number))
    versions.append(weights(tensors=12, elements=500_000, seed=1))
    roots = [root_of(words) for words in versions]
    base, *steps = [checkpoint(tmp_path / f"version_{number}", words) for number, words in enumerate(versions)]
    port = free_port()
    there = ("--listen", f"127.0.0.1:{port}", "--preset", "loopback")

    with swarm_in(tmp_path / "swarm") as swarm:
        # A seed of the old code: a new node joins without the model, then follows versions.
        swarm.start("seed", "seed", "--base", str(base), *there, **old)
        swarm.until("seed", lambda state: state["role"] == "seed", WITHIN_S)
        ticket = run_command(swarm, "invite", "--nodes", "4", **old)["ticket"]
        run_command(swarm, "publish", str(steps[0]), **old)
        swarm.node("new", ticket)
        swarm.until("new", holds(roots[1]), WITHIN_S)
        run_command(swarm, "publish", str(steps[1]), **old)
        assert swarm.until("new", holds(roots[2]), WITHIN_S)["nodes"][0]["held"] == [0, 2]
        swarm.until("seed", all_hold((0, 2), 1))
        swarm.signal("seed")

        # A seed of the new code on the same home: the new node continues, and an old node joins and follows.
        swarm.seed(base, *there)
        assert swarm.state("seed")["head"] == [0, 2]
        run_command(swarm, "publish", str(steps[2]))
        swarm.until("new", holds(roots[3]), WITHIN_S)
        swarm.start("old", "join", ticket, "--engine", "none", *LOOPBACK, **old)
        swarm.until("old", holds(roots[3]), WITHIN_S)
        run_command(swarm, "publish", str(steps[3]))
        for name in ("new", "old"):
            assert swarm.until(name, holds(roots[4]), WITHIN_S)["nodes"][0]["held"] == [0, 4]
        swarm.until("seed", all_hold((0, 4), 2))

        # A version of fifty times the size that was expected: its chunks have pieces of several sizes.
        run_command(swarm, "publish", str(steps[4]))
        for name in ("new", "old"):
            swarm.until(name, holds(roots[5]), WITHIN_S)
