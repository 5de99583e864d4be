"""A trainer and half of the nodes behind firewalls and NATs: real processes on emulated hosts.

Only `swarm-node` commands are used, as documented: a seed with `--via`, a relay with the seed's ticket, nodes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from kit import all_hold, checkpoint

from scenarios.emulator.network import Network
from scenarios.harness.swarm import swarm_in

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


def is_reached(dialable: bool, ways: tuple[str, ...]) -> Callable[[dict[str, Any]], bool]:
    """Condition on a node's state: whether the roster lists it as dialable, and the seed reached in one of these ways.
    That may take a while: on a busy machine a connection may time out and be made again."""
    return lambda state: state["nodes"][0]["dialable"] == dialable and state["seed_reached"] in ways


def reaches(peer: str, ways: tuple[str, ...]) -> Callable[[dict[str, Any]], bool]:
    return lambda state: any(node["peer"] == peer and node["reached"] in ways for node in state["nodes"])


def test_every_node_gets_every_version(tmp_path: Path) -> None:
    """Four of eight nodes behind firewalls and NATs, the trainer behind one, a relay outside."""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(NO_TORCH)
    network, environment = Network(rtt_ms=20), {"PYTHONPATH": str(tmp_path / "bare")}
    rng = np.random.default_rng(3)
    words = (rng.standard_normal(300_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    base = checkpoint(tmp_path / "step_0", [words])
    trainer = network.host("trainer", up_mbit=200, down_mbit=200, firewall="in")
    relay = network.host("relay", up_mbit=200, down_mbit=200)
    nodes = [
        network.host(f"{kind}{index}", up_mbit=100, down_mbit=100, firewall=kind)
        for index, kind in enumerate(FIREWALLS)
    ]
    hosts = {host.name: host for host in (trainer, relay, *nodes)}
    on = {"on": lambda name: hosts[name].popen, "environment": environment, "patience_s": PATIENCE_S}
    with network, swarm_in(tmp_path, **on) as swarm:
        via = ("--via", f"{relay.address}:4001")
        swarm.start("trainer", "seed", "--base", str(base), "--preset", "lan", *via)
        swarm.until("trainer", lambda state: state["head"] == [0, 0])
        invitation = swarm.json("trainer", "invite")
        assert invitation["addrs"] == [f"/ip4/{relay.address}/tcp/4001/p2p-circuit"]
        swarm.start("relay", "relay", invitation["ticket"])
        swarm.until("trainer", all_hold([0, 0], 1))
        for node in nodes:
            swarm.start(node.name, "join", invitation["ticket"], "--engine", "none")
        swarm.until("trainer", all_hold([0, 0], 1 + len(nodes)))

        for version in (1, 2):
            words[rng.choice(len(words), 3000, replace=False)] ^= 1
            swarm.publish(checkpoint(tmp_path / f"step_{version}", [words]), name="trainer")
            state = swarm.until("trainer", all_hold([0, version], 1 + len(nodes)))

        for node, kind in zip(nodes, FIREWALLS, strict=True):
            # A symmetric NAT uses another port for each destination, so hole punching to the trainer fails.
            expected = ("circuit",) if kind == "symmetric" else ("punched", "direct")
            own = swarm.until(node.name, is_reached(kind == "none", expected))
            assert (own["nodes"][0]["held"], own["nodes"][0]["root"]) == ([0, 2], state["root"])
            swarm.until("trainer", reaches(own["nodes"][0]["peer"], expected))
        assert swarm.state("relay")["circuits"] >= 1
        assert state["relays"] == {f"/ip4/{relay.address}/tcp/4001": ""}

        # The relay is killed and restarted. Punched and direct nodes no longer need it; the node on a circuit uses it
        # again, and the relay itself is a member again.
        swarm.kill("relay")
        swarm.start("relay", "relay", invitation["ticket"])
        words[rng.choice(len(words), 3000, replace=False)] ^= 1
        swarm.publish(checkpoint(tmp_path / "step_3", [words]), name="trainer")
        swarm.until("trainer", all_hold([0, 3], 1 + len(nodes)))
