"""Published RL trainers, in an environment of their own, on a swarm whose nodes generate tokens.

ENGINE=vllm or ENGINE=sglang has nodes run one of these, for the tests of `drawing`; by default they run transformers.
Those of `adapters` are then skipped with SGLang.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from node.host.port import free_port
from scenarios.harness.environments import environment
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in

HERE = Path(__file__).parent
SERVER_WITHIN_S = 600.0
"""For two inference servers to start on two cores."""
ENGINE = os.environ.get("ENGINE", "transformers")
TRAINED_WITHIN_S = 240.0 if ENGINE == "transformers" else 600.0
adapters = pytest.mark.skipif(ENGINE == "sglang", reason="SGLang serves no adapters")
"""Marks a test that needs an engine with adapters."""


@contextmanager
def drawing(
    folder: Path, *gateway: str, seed: Sequence[str] = (), names: Sequence[str] = ("node",)
) -> Iterator[tuple[Swarm, Path, str]]:
    """A swarm whose nodes, by `names`, generate tokens, its base folder, and its gateway's URL. `gateway`, `seed`:
    arguments for these."""
    from node.trainers.grpo.tiny import tiny_folder

    base, port, engine = tiny_folder(lambda line: None), free_port(), engine_words()
    with swarm_in(folder, patience_s=STARTED_WITHIN_S if ENGINE == "transformers" else SERVER_WITHIN_S) as swarm:
        swarm.seed(base, *seed)
        ticket = swarm.ticket("--nodes", str(len(names)))
        for name in names:
            swarm.start(name, "join", ticket, "--name", name, "--threads", "1", *engine, *LOOPBACK)
        where = ("--home", str(swarm.home("seed")), "--at", f"127.0.0.1:{port}")
        swarm.start("gateway", "gateway", *where, *(word.format(base=base) for word in gateway))
        swarm.until(
            "seed", lambda state: [node["engine"] is not None for node in state["nodes"]] == [True] * len(names)
        )
        yield swarm, base, f"http://127.0.0.1:{port}"


def engine_words(engine: str = ENGINE) -> tuple[str, ...]:
    """The arguments of `join` for this engine; by default the one that ENGINE names."""
    if engine == "vllm":
        from scenarios.engines.vllm_environment import vllm_python

        return "--engine", "vllm", "--engine-port", "0", "--vllm-python", str(vllm_python())
    if engine == "sglang":
        from scenarios.engines.sglang_environment import sglang_python

        return "--engine", "sglang", "--engine-port", "0", "--sglang-python", str(sglang_python())
    return "--engine", engine


def train(swarm: Swarm, script: str, *words: object, name: str = "trainers", **environ: str) -> dict[str, Any]:
    """Run a script of this folder around such a trainer to its end, in the environment of `name`.txt.

    Returns the report that it prints last.
    """
    printed = _run(swarm, name, [str(HERE / script), *map(str, words)], environ)
    return json.loads(printed.strip().splitlines()[-1])


def train_ranks(swarm: Swarm, name: str, script: str, base: Path, out: Path, steps: int) -> dict[str, Any]:
    """Run a script on two ranks over gloo, in the environment of `name`.txt, with the nodes `lost` and `stays`.

    Returns the report that its rank 0 writes.
    """
    out.mkdir()
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words = [str(HERE / script), swarm.home("seed"), base, steps, out, swarm.pid("lost"), swarm.home("stays")]
    _run(swarm, name, [*ranks, *map(str, words)], {})
    assert swarm.running["lost"].poll() is not None, "the node was not killed"
    return json.loads((out / "report.json").read_text())


def _run(swarm: Swarm, name: str, words: list[str], more: dict[str, str]) -> str:
    python = environment(name, HERE / f"{name}.txt", inherit=True)
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[2])} | more
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # several processes import the same large packages
    process = subprocess.Popen(
        [python, *words], env=environ, cwd=swarm.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=TRAINED_WITHIN_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
    assert process.returncode == 0, errors[-3000:] + swarm.log("gateway")
    return out


def check_lossless(report: dict[str, Any], steps: int, samples: int) -> None:
    """Each step had all of its samples, of its own version, although one of the nodes was killed in the second."""
    drawn = report["samples"]
    assert [sum(step.values()) for step in drawn] == [samples] * steps, "samples were lost, or given twice"
    assert (len(drawn[0]), len(drawn[-1])) == (2, 1), "both nodes drew, then the one that was left"
    assert report["lags"] == [0]
    check_live(report, steps)


def check_live(report: dict[str, Any], steps: int) -> None:
    """After each step the engine of each living node had the bits of the version: of two in the first, then of one."""
    nodes = [2] + [1] * (steps - 1)
    assert [row["live"] for row in report["versions"]] == [
        [row["root"]] * count for row, count in zip(report["versions"], nodes, strict=True)
    ]
