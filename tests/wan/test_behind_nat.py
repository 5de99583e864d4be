"""A trainer and half of the nodes behind firewalls and NATs: real processes on emulated hosts.

Only `swarm-node` commands are used, as documented: a seed with `--via`, a relay with the seed's ticket, nodes.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from node.status.query import ask
from node.status.schema import to_plain
from scenarios.emulator.network import Host, Network
from swarm.transport.base import Unreachable

pytestmark = [pytest.mark.wan, pytest.mark.alone]

PATIENCE_S = 150.0
"""Time limit, s: eleven processes start on two shared cores."""
NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tokenizers", "vllm"}:
            raise ModuleNotFoundError(f"{name} is not on this machine", name=name)

sys.meta_path.insert(0, Refuse())
"""
"""A `sitecustomize` module, which Python runs at its start: torch cannot be imported on these hosts."""
FIREWALLS: tuple[Literal["none", "in", "nat", "symmetric"], ...] = (
    "none", "in", "none", "nat", "none", "symmetric", "none", "in",
)  # fmt: skip


def checkpoint(folder: Path, words: np.ndarray) -> str:
    """A Hugging Face folder of one bf16 tensor with these bits."""
    folder.mkdir()
    entry = {"dtype": "BF16", "shape": [len(words)], "data_offsets": [0, 2 * len(words)]}
    header = json.dumps({"model.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + words.tobytes())
    (folder / "config.json").write_text('{"model_type": "none"}')
    return str(folder)


class Field:
    """Hosts with one `swarm-node` process each. The test asks the processes over the sockets in their homes."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder, self.network = folder, network
        (folder / "bare").mkdir()
        (folder / "bare" / "sitecustomize.py").write_text(NO_TORCH)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: Host, *words: str) -> None:
        with (self.folder / f"{host.name}.log").open("ab") as log:
            self._running[host.name] = host.popen(self._line(host.name, words), stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def command(self, name: str, *words: str) -> Any:
        done = subprocess.run(self._line(name, words), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def _line(self, name: str, words: tuple[str, ...]) -> list[str]:
        return [
            "env",
            f"SWARM_HOME={self.folder / name}",
            f"PYTHONPATH={self.folder / 'bare'}",
            "NUMBA_NUM_THREADS=1",
            sys.executable,
            "-m",
            "node.cli",
            *words,
        ]

    def state(self, name: str) -> dict[str, Any]:
        try:
            return to_plain(ask(self.folder / name))
        except Unreachable:
            return {}

    def until(self, name: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        state: dict[str, Any] = {}
        while time.monotonic() < deadline:
            state = self.state(name)
            if state and condition(state):
                return state
            if name in self._running and self._running[name].poll() is not None:
                break
            time.sleep(0.2)
        log = (self.folder / f"{name}.log").read_text()[-3000:]
        pytest.fail(f"{name} is at {json.dumps(state, default=str)}: {log}")


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path, Network(rtt_ms=20))


def all_hold(version: int, members: int) -> Callable[[dict[str, Any]], bool]:
    return lambda state: [node["held"] for node in state["nodes"]] == [[0, version]] * members


def is_reached(dialable: bool, ways: tuple[str, ...]) -> Callable[[dict[str, Any]], bool]:
    """Condition on a node's state: whether the roster lists it as dialable, and the seed reached in one of these ways.
    That may take a while: on a busy machine a connection may time out and be made again."""
    return lambda state: state["nodes"][0]["dialable"] == dialable and state["seed_reached"] in ways


def reaches(peer: str, ways: tuple[str, ...]) -> Callable[[dict[str, Any]], bool]:
    return lambda state: any(node["peer"] == peer and node["reached"] in ways for node in state["nodes"])


def test_every_node_gets_every_version(field: Field, tmp_path: Path) -> None:
    """Four of eight nodes behind firewalls and NATs, the trainer behind one, a relay outside."""
    rng = np.random.default_rng(3)
    words = (rng.standard_normal(300_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    base = checkpoint(tmp_path / "step_0", words)
    trainer = field.network.host("trainer", up_mbit=200, down_mbit=200, firewall="in")
    relay = field.network.host("relay", up_mbit=200, down_mbit=200)
    nodes = [
        field.network.host(f"{kind}{index}", up_mbit=100, down_mbit=100, firewall=kind)
        for index, kind in enumerate(FIREWALLS)
    ]
    with field.network:
        via = ("--via", f"{relay.address}:4001")
        field.start(trainer, "seed", "--base", base, "--preset", "lan", *via)
        field.until("trainer", lambda state: state["head"] == [0, 0])
        invitation = field.command("trainer", "invite", "--json")
        assert invitation["addrs"] == [f"/ip4/{relay.address}/tcp/4001/p2p-circuit"]
        field.start(relay, "relay", invitation["ticket"])
        field.until("trainer", all_hold(0, 1))
        for node in nodes:
            field.start(node, "join", invitation["ticket"], "--engine", "none")
        field.until("trainer", all_hold(0, 1 + len(nodes)))

        for version in (1, 2):
            words[rng.choice(len(words), 3000, replace=False)] ^= 1
            field.command("trainer", "publish", checkpoint(tmp_path / f"step_{version}", words), "--json")
            state = field.until("trainer", all_hold(version, 1 + len(nodes)))

        for node, kind in zip(nodes, FIREWALLS, strict=True):
            # A symmetric NAT uses another port for each destination, so hole punching to the trainer fails.
            expected = ("circuit",) if kind == "symmetric" else ("punched", "direct")
            own = field.until(node.name, is_reached(kind == "none", expected))
            assert (own["nodes"][0]["held"], own["nodes"][0]["root"]) == ([0, 2], state["root"])
            field.until("trainer", reaches(own["nodes"][0]["peer"], expected))
        assert field.state("relay")["circuits"] >= 1
        assert state["relays"] == {f"/ip4/{relay.address}/tcp/4001": ""}

        # The relay is killed and restarted. Punched and direct nodes no longer need it; the node on a circuit uses it
        # again, and the relay itself is a member again.
        field.kill("relay")
        field.start(relay, "relay", invitation["ticket"])
        words[rng.choice(len(words), 3000, replace=False)] ^= 1
        field.command("trainer", "publish", checkpoint(tmp_path / "step_3", words), "--json")
        field.until("trainer", all_hold(3, 1 + len(nodes)))
