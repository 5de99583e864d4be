"""A swarm of real processes over real libp2p, controlled only by the command line."""

import signal
from pathlib import Path

import numpy as np
from kit import all_hold, checkpoint
from status_kit import GOLDEN, paths

from scenarios.harness.swarm import LOOPBACK, Ended, swarm_in


def refused(code: int, why: str, ended: Ended) -> None:
    assert (ended.code, why in ended.err) == (code, True), ended


def test_seed_invite_join_relay_publish_status(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    first = (rng.standard_normal(300_000).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    second = first.copy()
    second[rng.choice(len(first), 3000, replace=False)] ^= 1
    base, step_1 = checkpoint(tmp_path / "base", [first]), checkpoint(tmp_path / "step_1", [second])

    with swarm_in(tmp_path, patience_s=120.0) as swarm:
        swarm.seed(base)
        ticket = swarm.ticket("--nodes", "3")

        # One has the base, one has nothing, one only passes chunks on.
        swarm.node("box", ticket, "--model", str(base))
        swarm.node("bare", ticket)
        swarm.start("relay", "relay", ticket, *LOOPBACK)
        swarm.until("seed", all_hold([0, 0], 3))

        report = swarm.publish(step_1)
        assert (report["version"], report["changed"]) == (1, 3000)
        state = swarm.until("seed", all_hold([0, 1], 3))
        assert (state["head"], state["root"]) == ([0, 1], report["root"])
        said = {name: swarm.json(name, "status") for name in ("seed", "box", "relay")}
        assert said["seed"]["head"] == [0, 1]
        assert set(paths(said["seed"])) <= set(GOLDEN["seed"])
        assert paths(said["box"]) == GOLDEN["node without engine"]
        assert paths(said["relay"]) == GOLDEN["relay"]

        # A fourth machine on a ticket for three, and a checkpoint of another model.
        refused(2, "All 3 places", swarm.command("fourth", "relay", ticket, *LOOPBACK))
        other = checkpoint(tmp_path / "other", [first[:1000]])
        refused(2, "layer.000.weight", swarm.command("seed", "publish", str(other)))

        # A second process on one home is told so; the first goes on.
        refused(2, "nother process", swarm.command("box", "join", ticket, "--engine", "none"))

        # A member that leaves frees its slot at once; a command that asks a seed that is gone ends with exit code 3.
        assert swarm.signal("relay", signal.SIGINT) == 130
        swarm.until("seed", all_hold([0, 1], 2))
        assert swarm.signal("seed") == 143
        refused(3, "swarm-node seed", swarm.command("seed", "publish", str(step_1)))
        assert swarm.signal("box") == swarm.signal("bare") == 143
