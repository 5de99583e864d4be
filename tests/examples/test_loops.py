"""The example loops over a real seed and two real nodes, one of which is killed during the run.

`verify_loop.py`, which uses no code of this project, checks what they record, in a process of its own.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from node.host.port import free_port
from scenarios.harness.swarm import Swarm, swarm_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(find_spec("torch") is None or find_spec("peft") is None, reason="needs torch and peft"),
]

ROOT = Path(__file__).parents[2]
STEPS, KILL_AFTER = 10, 3  # the node is killed while samples of step 4 are generated
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
CLI = [sys.executable, "-m", "node.cli"]
ENV = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def make_moe(folder: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def make_llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def status(home: Path) -> dict:
    return json.loads(subprocess.run([*CLI, "status", "--json", "--home", str(home)], env=ENV, check=True,
                                     capture_output=True, text=True, timeout=60).stdout)  # fmt: skip


@pytest.fixture
def swarm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Swarm]:
    """A seed and the nodes `lost` and `stays`, which generate."""
    request.param(base := tmp_path / "base")
    with swarm_in(tmp_path, environment={"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}) as swarm:
        swarm.seed(base, "--check-share", "0")
        swarm.engines(("lost", "stays"), base, "--threads", "1", "--replica", "ram")
        yield swarm


def snapshot(home: Path, pid: int, out: Path, version: str) -> None:
    """Save the bytes of a node's replica, read from its memory, once it reports that it holds the version."""
    deadline = time.monotonic() + 60
    want = [int(x) for x in version.split(".")]
    while not any(x["name"] == "stays" and x["held"] == want and x["engine"] == want for x in status(home)["nodes"]):
        assert time.monotonic() < deadline, f"the node does not reach {version}"
        time.sleep(0.1)
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        if "memfd:swarm-replica" in os.readlink(fd):
            out.mkdir(exist_ok=True)
            (out / f"{version}.bin").write_bytes(fd.read_bytes())
            return
    raise AssertionError("the node has no replica in memory")


@pytest.mark.parametrize(
    ("swarm", "example", "command", "shape"),
    [
        pytest.param(make_moe, "fsdp2_moe", TORCHRUN, (2, 4, 4), id="fsdp2-moe"),
        pytest.param(make_llama, "lora_grpo", [], (0, 4, 8), id="lora-grpo"),
    ],
    indirect=["swarm"],
)  # fmt: skip
def test_ten_steps_with_a_node_killed(
    swarm: Swarm, example: str, command: list[str], shape: tuple[int, int, int], tmp_path: Path
) -> None:
    record, snapshots, script = tmp_path / "record", tmp_path / "snapshots", ROOT / "examples" / f"{example}.py"
    look = [sys.executable, __file__, str(tmp_path / "stays"), str(swarm.running["stays"].pid), str(snapshots)]
    if command:
        command = [*command, "--master-port", str(free_port())]
    run = [sys.executable, *command, str(script), "--base", str(tmp_path / "base"), "--home", str(tmp_path / "seed"),
           "--steps", str(STEPS), "--run-name", "test", "--record", str(record), "--max-tokens", "160",
           "--after-step", shlex.join(look)]  # fmt: skip
    begun = time.monotonic()
    swarm.start_command("loop", run)
    swarm.wait("the step before the kill", (snapshots / f"0.{KILL_AFTER}.bin").exists, 400.0)
    time.sleep(0.7)  # during the next step's samples, which take about two seconds
    swarm.kill("lost")
    killed = time.monotonic() - begun
    assert swarm.ends("loop", 400.0) == 0, swarm.log("loop")
    took = time.monotonic() - begun
    ranks, groups, n = shape
    verify = [sys.executable, str(Path(__file__).with_name("verify_loop.py")), str(tmp_path / "base"), str(record),
             str(snapshots), "--run", "test", "--steps", str(STEPS), "--ranks", str(ranks), "--groups", str(groups),
             "--n", str(n)]  # fmt: skip
    plain = {k: v for k, v in ENV.items() if k != "PYTHONPATH"}
    verified = subprocess.run(verify, env=plain, cwd=tmp_path, capture_output=True, text=True)
    report = json.loads(verified.stdout.splitlines()[-1]) if verified.stdout else verified.stderr
    print(
        json.dumps({"example": example, "loop_s": round(took, 1), "killed_after_s": round(killed, 1), "report": report})
    )
    assert verified.returncode == 0, report
    assert len(report["nodes"]) == 2, "the node that was killed had generated nothing"
    assert swarm.command("stays", "status", "--prove").code == 0, "the surviving engine's bits are not the version's"


if __name__ == "__main__":
    snapshot(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), os.environ["VERSION"])
