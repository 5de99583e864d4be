"""The example loops over a real seed and two real nodes, one of which is killed during the run.

`verify_loop.py`, which uses no code of this project, checks what they record, in a process of its own.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

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


class Boxes:
    """A seed and two nodes, each a process of its own."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.folder, self.base, self.running = folder, base, {}
        self.start("seed", "seed", "--base", str(base), "--preset", "loopback", "--check-share", "0")
        self.until("seed", lambda state: state["role"] == "seed")
        invite = [*CLI, "invite", "--home", str(folder / "seed"), "--json"]
        report = json.loads(subprocess.run(invite, env=ENV, check=True, capture_output=True, text=True).stdout)
        (folder / "ticket").write_text(report["ticket"])

    def join(self, name: str) -> None:
        self.start(name, "join", "--ticket-file", str(self.folder / "ticket"), "--model", str(self.base),
                   "--threads", "1", "--name", name, "--replica", "ram")  # fmt: skip

    def start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            where = ["--home", str(self.folder / name), "--listen", "127.0.0.1:0"]
            self.running[name] = subprocess.Popen(
                [*CLI, *command, *where], env=ENV, stdout=log, stderr=log, start_new_session=True
            )

    def until(self, name: str, condition, within_s: float = 90) -> None:
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(subprocess.CalledProcessError, KeyError):
                if condition(status(self.folder / name)):
                    return
            assert self.running[name].poll() is None, (self.folder / f"{name}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, f"{name} did not get there in {within_s} s"
            time.sleep(0.3)

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        """Kill the process and its engines."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.running[name].pid, how)
        self.running.pop(name).wait(60)

    def close(self) -> None:
        for name in list(self.running):
            self.kill(name, signal.SIGTERM)


@pytest.fixture
def boxes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Boxes]:
    request.param(tmp_path / "base")
    swarm = Boxes(tmp_path, tmp_path / "base")
    try:
        for name in ("lost", "stays"):
            swarm.join(name)
        for name in ("lost", "stays"):
            swarm.until(name, lambda state, n=name: any(x["name"] == n and x["engine"] for x in state["nodes"]))
        yield swarm
    finally:
        swarm.close()


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
    ("boxes", "example", "command", "shape"),
    [
        pytest.param(make_moe, "fsdp2_moe", TORCHRUN, (2, 4, 4), id="fsdp2-moe"),
        pytest.param(make_llama, "lora_grpo", [], (0, 4, 8), id="lora-grpo"),
    ],
    indirect=["boxes"],
)  # fmt: skip
def test_ten_steps_with_a_node_killed(
    boxes: Boxes, example: str, command: list[str], shape: tuple[int, int, int], tmp_path: Path
) -> None:
    record, snapshots, script = tmp_path / "record", tmp_path / "snapshots", ROOT / "examples" / f"{example}.py"
    look = [sys.executable, __file__, str(tmp_path / "stays"), str(boxes.running["stays"].pid), str(snapshots)]
    if command:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            command = [*command, "--master-port", str(free.getsockname()[1])]
    run = [sys.executable, *command, str(script), "--base", str(boxes.base), "--home", str(tmp_path / "seed"),
           "--steps", str(STEPS), "--run-name", "test", "--record", str(record), "--max-tokens", "160",
           "--after-step", shlex.join(look)]  # fmt: skip
    begun = time.monotonic()
    with (tmp_path / "loop.log").open("wb") as log:
        loop = subprocess.Popen(run, env=ENV, stdout=log, stderr=log)
    try:
        while not (snapshots / f"0.{KILL_AFTER}.bin").exists() and loop.poll() is None:
            time.sleep(0.02)
        time.sleep(0.7)  # during the next step's samples, which take about two seconds
        boxes.kill("lost")
        killed = time.monotonic() - begun
        assert loop.wait(400) == 0, (tmp_path / "loop.log").read_text()[-4000:]
    finally:
        loop.kill()
    took = time.monotonic() - begun
    ranks, groups, n = shape
    verify = [sys.executable, str(Path(__file__).with_name("verify_loop.py")), str(boxes.base), str(record),
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
    proof = subprocess.run([*CLI, "status", "--prove", "--home", str(tmp_path / "stays")], env=ENV)
    assert proof.returncode == 0, "the surviving engine's bits are not the version's"


if __name__ == "__main__":
    snapshot(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), os.environ["VERSION"])
