"""prime-rl on a swarm of processes: its orchestrator's routes, and the client by which its environments get tokens.

prime-rl is on no package index. `PRIME_RL_SOURCE=CLONE pytest -m slow tests/node/trainers/test_prime_rl.py` also runs
its own code, at `COMMIT`, from a clone of its repository.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import kit
import numpy as np
import pytest
from published_kit import adapters, drawing
from safetensors.numpy import save_file

from codec import Checkpoint, Layout, Replica, TensorSpec, write_checkpoint
from codec.adapter import linear_layers
from node.host.port import free_port
from node.status.query import ask
from scenarios.harness.environments import environment
from scenarios.harness.swarm import NODE, swarm_in

HERE: Final = Path(__file__).parent
COMMIT: Final = "559b44772e471d1538537b8805cc77f3824a5e64"
SOURCE: Final = os.environ.get("PRIME_RL_SOURCE")
MODEL: Final = "the/policy"
NODES: Final = ("lost", "stays")
SAMPLES: Final = 16


def post(port: int, route: str, value: object = None, **headers: str) -> tuple[int, dict[str, Any]]:
    return speak(port, "POST", route, json.dumps(value), headers)


def speak(port: int, method: str, route: str, body: str = "", headers: Any = ()) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, route, body, dict(headers))
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


class Admin:
    """The adapter's process, started as on the command line."""

    def __init__(self, port: int, home: Path) -> None:
        words = ["--model-name", MODEL, "--at", f"127.0.0.1:{port}", "--home", str(home), "--timeout-s", "60"]
        self.port, self.url = port, f"http://127.0.0.1:{port}/v1"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "node.trainers.prime_rl", *words], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.url


@pytest.fixture
def admin_on() -> Iterator[Any]:
    started: list[Admin] = []

    def start(port: int, home: Path) -> Admin:
        started.append(Admin(port, home))
        return started[-1]

    yield start
    for admin in started:
        admin.process.terminate()
        admin.process.wait()


def broadcast(folder: Path, words: Any) -> Path:
    """A checkpoint folder as prime-rl's trainer writes it."""
    kit.checkpoint(folder, words)
    (folder / "STABLE").touch()
    return folder


def broadcast_adapter(folder: Path, rank: int, targets: list[str], values: dict[str, np.ndarray]) -> None:
    """An adapter as prime-rl's trainer broadcasts it: tensors without the prefix of peft's names."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": MODEL, "r": rank,
        "lora_alpha": 32.0, "lora_dropout": 0.0, "bias": "none", "target_modules": targets, "modules_to_save": None,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(values, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "STABLE").touch()


@pytest.mark.slow
def test_the_admin_routes(tmp_path: Path, admin_on: Any) -> None:
    words = kit.weights(4)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(kit.checkpoint(tmp_path / "base", words))
        swarm.start("node", "join", swarm.ticket(), "--model", str(tmp_path / "base"), *NODE)
        swarm.until("seed", lambda state: len(state["nodes"]) == 1 and state["nodes"][0]["held"] == [0, 0])
        port = admin_on(free_port(), swarm.home("seed")).port
        assert speak(port, "GET", "/health") == (200, {"status": "ok"})
        assert speak(port, "GET", "/v1/models")[1]["data"][0]["id"] == MODEL
        assert post(port, "/pause?mode=keep&clear_cache=false")[0] == 200

        first = broadcast(tmp_path / "broadcasts" / "step_1", kit.step(words, 1))
        root = kit.root_of(kit.step(words, 1))
        assert post(port, "/update_weights", {"weight_dir": str(first)})[1]["version"] == [0, 1]
        assert swarm.state("node")["nodes"][0]["root"] == root, "the answer comes when the nodes hold the version"
        assert post(port, "/update_weights", {"weight_dir": str(first)})[1]["version"] == [0, 1], "asked again"
        assert post(port, "/resume")[0] == 200
        assert ask(swarm.home("seed")).head == (0, 1)

        other = broadcast(tmp_path / "broadcasts" / "step_2", kit.weights(3))
        for wrong, why in (
            ({"weight_dir": str(other)}, "another model"),
            ({"weight_dir": str(tmp_path / "none")}, "none"),
            ({"weight_dir": None}, "filesystem"),
            ([], "filesystem"),
        ):
            status, answer = post(port, "/update_weights", wrong)
            assert (status, why in answer["error"]["message"]) == (400, True), answer
        for wrong, why in (
            ({"lora_name": "a", "lora_path": str(first)}, "--adapters 8"),
            ({"lora_name": "a/b", "lora_path": str(first)}, "characters"),
            ({"lora_name": "a"}, "filesystem"),
        ):
            status, answer = post(port, "/load_lora_adapter", wrong)
            assert (status, why in answer["error"]["message"]) == (400, True), answer
        assert post(port, "/init_broadcaster")[0] == 404
        assert post(port, "/update_weights", {"weight_dir": str(first)}, origin="http://evil.example")[0] == 403

        swarm.signal("seed", signal.SIGKILL)
        assert speak(port, "GET", "/health")[0] == 503


@pytest.mark.slow
def test_a_lora_run_publishes_the_adapter(tmp_path: Path, admin_on: Any) -> None:
    """prime-rl names a folder for each step: an adapter as peft saves it. It has one adapter in each of its runs."""
    layout = Layout((TensorSpec("layers.0.up.weight", "BF16", (48, 32)),))
    bits = np.arange(48 * 32, dtype=np.uint16)
    write_checkpoint(tmp_path / "base", layout, lambda name: bits, {"config.json": b"{}"})
    with swarm_in(tmp_path) as swarm:
        swarm.seed(tmp_path / "base", "--adapters", "2", "--adapter-rank", "4")
        swarm.start("node", "join", swarm.ticket(), "--model", str(tmp_path / "base"), *NODE)
        swarm.until("seed", lambda state: len(state["nodes"]) == 1 and state["nodes"][0]["held"] == [0, 0])
        port = admin_on(free_port(), swarm.home("seed")).port
        for step, name in ((1, "run-1"), (1, "run-2"), (2, "run-1")):
            folder = tmp_path / name / f"step_{step}"
            folder.mkdir(parents=True)
            values = {
                "layers.0.up.lora_A.weight": np.full((4, 32), step, np.float32),
                "layers.0.up.lora_B.weight": np.full((48, 4), -step, np.float32),
            }
            broadcast_adapter(folder, 4, ["up"], values)
            asked = {"lora_name": name, "lora_path": str(folder)}
            status, answer = post(port, "/load_lora_adapter", asked)
            assert status == 200, answer
            assert post(port, "/load_lora_adapter", asked)[1] == answer, "asked again"
            state = swarm.state("seed")
            assert answer["version"] == state["head"]
            assert swarm.state("node")["nodes"][0]["root"] == state["root"], "it is held when the answer comes"
        listed = swarm.json("seed", "adapters")["adapters"]
        assert [(row["name"], row["version"]) for row in listed] == [("run-1", 2), ("run-2", 1)]
        for wrong, why in ((str(tmp_path / "base"), r"has no adapter_config.json"), (str(tmp_path / "none"), "has no")):
            status, answer = post(port, "/load_lora_adapter", {"lora_name": "run-1", "lora_path": wrong})
            assert (status, why in answer["error"]["message"]) == (400, True), answer


def _run(tmp_path: Path, base: Path, url: str, *more: str, samples: int = 1, lost: int = 0) -> list[dict[str, Any]]:
    python = environment("prime_rl", HERE / "prime_rl.txt", inherit=True)
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(base, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    (tokenizer / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parents[2])}
    done = subprocess.run(
        [python, HERE / "prime_rl_run.py", url, tokenizer, MODEL, *more],
        env=environ | {"SAMPLES": str(samples), "LOST": str(lost)}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def _check(samples: list[dict[str, Any]], count: int = 1) -> None:
    assert len(samples) == count, "samples were lost"
    for drawn in samples:
        assert len(drawn["prompt"]) == 5
        assert 0 < len(drawn["drawn"]) == len(drawn["logprobs"]) <= 5
        assert all(value < 0 for value in drawn["logprobs"])
        assert drawn["finish_reason"] in ("stop", "length")


def _broadcast_of(base: Path, folder: Path) -> str:
    """Some bits of `base` changed, as prime-rl's trainer writes a checkpoint. Returns its root."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(base, folder)
    weights = load_file(folder / "model.safetensors")
    for tensor in weights.values():
        tensor.view(torch.int16).flatten()[::7] ^= 1
    save_file(weights, folder / "model.safetensors")
    (folder / "STABLE").touch()
    return Replica.from_checkpoint(Checkpoint.open(folder), Checkpoint.open(base).layout).root.hex()


def _check_engines(swarm: Any, root: str, step: int) -> None:
    """The engines run on the bits of the broadcast: both nodes' in step 1, then that of the one that stays."""
    from recipe_kit import live_roots

    assert live_roots(swarm.home("stays"), step, root) == [root] * (2 if step == 1 else 1)
    assert ask(swarm.home("seed")).root == root


@pytest.mark.slow
@pytest.mark.long
def test_the_environments_of_prime_rl_get_tokens_of_what_was_broadcast(tmp_path: Path, admin_on: Any) -> None:
    with drawing(tmp_path, "--model-name", MODEL, names=NODES) as (swarm, base, url):
        folder = tmp_path / "run" / "broadcasts" / "step_1"
        root = _broadcast_of(base, folder)
        admin = admin_on(free_port(), swarm.home("seed"))
        assert post(admin.port, "/update_weights", {"weight_dir": str(folder)})[1]["version"] == [0, 1]
        _check_engines(swarm, root, 1)
        _check(_run(tmp_path, base, f"{url}/v1", samples=SAMPLES, lost=swarm.pid("lost")), SAMPLES)
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
        _check_engines(swarm, root, 2)


if SOURCE:

    @pytest.fixture
    def source(tmp_path: Path) -> Path:
        """prime-rl's own code."""
        folder = tmp_path / "source"
        folder.mkdir()
        archive = subprocess.run(
            ["git", "archive", COMMIT, "src", "packages"], cwd=str(SOURCE), capture_output=True, check=True
        )
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return folder

    @pytest.mark.slow
    def test_the_client_of_prime_rl_updates_weights_and_gets_tokens(
        tmp_path: Path, admin_on: Any, source: Path
    ) -> None:
        with drawing(tmp_path, "--model-name", MODEL, names=NODES) as (swarm, base, url):
            admin = admin_on(free_port(), swarm.home("seed"))
            folder = tmp_path / "run" / "broadcasts" / "step_1"
            root = _broadcast_of(base, folder)
            more = str(source), admin.url, str(folder)
            _check(_run(tmp_path, base, f"{url}/v1", *more, samples=SAMPLES, lost=swarm.pid("lost")), SAMPLES)
            assert swarm.running["lost"].poll() is not None, "the node was not killed"
            _check_engines(swarm, root, 2)
            assert (folder / "NCCL_READY").exists(), "its own code ran"
            assert ask(swarm.home("seed")).head == (0, 1)

    @adapters
    @pytest.mark.slow
    def test_the_client_of_prime_rl_loads_an_adapter_and_gets_its_tokens(
        tmp_path: Path, admin_on: Any, source: Path
    ) -> None:
        room = ("--adapters", "2", "--adapter-rank", "8")
        with drawing(tmp_path, "--model-name", MODEL, seed=room) as (swarm, base, url):
            admin = admin_on(free_port(), swarm.home("seed"))
            folder, rng, values = tmp_path / "run" / "broadcasts" / "step_1", np.random.default_rng(0), {}
            for module, (out, in_) in linear_layers(Checkpoint.open(base).layout).items():
                for matrix, shape in (("A", (8, in_)), ("B", (out, 8))):
                    values[f"{module}.lora_{matrix}.weight"] = 0.02 * rng.standard_normal(shape, np.float32)
            targets = sorted({name.split(".")[-3] for name in values})
            broadcast_adapter(folder, 8, targets, values)
            _check(_run(tmp_path, base, f"{url}/v1", str(source), admin.url, str(folder), "r8-1e-4"))
            (adapter,) = swarm.seed_status().parts.adapters
            assert (adapter.name, adapter.version, adapter.rank) == ("r8-1e-4", 1, 8)
            assert swarm.state("node")["nodes"][0]["root"] == swarm.seed_status().root
            assert swarm.seed_status().work.accepted == 1
