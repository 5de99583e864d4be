"""Key rotation: the seed gets another key, and members follow by themselves with the bits that they have."""

import signal
from pathlib import Path

import pytest
from kit import all_hold, check, checkpoint, holds, root_of, step, weights

from node.host.port import free_port
from scenarios.harness.swarm import swarm_in

pytestmark = pytest.mark.slow

FIRST = weights(tensors=20, elements=100_000)
SECOND, THIRD = step(FIRST, 1, 0.002), step(step(FIRST, 1, 0.002), 2, 0.002)
MODEL_BYTES = sum(tensor.nbytes for tensor in FIRST)


def in_new_swarm(swarm: str, root: str):
    return lambda state: state["swarm"] == swarm and holds(root)(state)


def test_members_follow_a_new_key_and_refuse_the_old_one(tmp_path: Path) -> None:
    at = ("--listen", f"127.0.0.1:{free_port()}")
    base = checkpoint(tmp_path / "base", FIRST)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base, *at)
        old = swarm.state("seed")["swarm"]
        ticket = swarm.ticket("--nodes", "3")
        for name in ("node1", "node2"):
            swarm.node(name, ticket, "--name", name)
        swarm.start("relay", "relay", ticket, "--listen", "127.0.0.1:0", "--name", "relay")
        swarm.until("seed", all_hold((0, 0), 3))
        swarm.publish(checkpoint(tmp_path / "one", SECOND), "--wait")
        swarm.until("seed", all_hold((0, 1), 3))

        check(swarm.command("seed", "rotate-key"), 2, "Another process uses")
        assert swarm.signal("seed") == 143
        rotated = swarm.json("seed", "rotate-key")
        assert rotated["old_peer_id"] == old
        assert (rotated["machines"], rotated["version"]) == (3, [1, 0])
        new = rotated["peer_id"]

        swarm.seed(base, *at)
        assert swarm.state("seed")["swarm"] == new
        swarm.until("seed", all_hold((1, 0), 3))
        for name in ("node1", "node2"):
            state = swarm.until(name, in_new_swarm(new, root_of(SECOND)))
            assert state["nodes"][0]["received_bytes"] < MODEL_BYTES / 10, "the nodes keep their bits"
        swarm.publish(checkpoint(tmp_path / "two", THIRD), "--wait")
        for name in ("node1", "node2"):
            state = swarm.until(name, in_new_swarm(new, root_of(THIRD)))
            assert state["nodes"][0]["received_bytes"] < MODEL_BYTES / 2
        assert "handed_over" in swarm.log("seed", 1 << 20)

        # The old key, which its owner or a thief still uses, and its tickets.
        files = swarm.home("seed")
        check(swarm.command("seed", "seed", "--base", str(base), "--key", rotated["old_file"], *at), 2, "was replaced")
        check(swarm.command("stranger", "join", ticket, "--engine", "none", "--wait-for-seed", "3s"), 3, "cannot be")
        assert not (files / "handover.json").exists()

        # A node restarted with the ticket of the old swarm joins the new one.
        assert swarm.signal("node1", signal.SIGTERM) == 143
        swarm.node("node1", ticket, "--name", "node1")
        state = swarm.until("node1", in_new_swarm(new, root_of(THIRD)))
        assert state["nodes"][0]["received_bytes"] < MODEL_BYTES / 10

        # The succession admits no other machine; a new ticket does.
        swarm.node("fresh", swarm.ticket(), "--name", "fresh", "--model", str(base))
        swarm.until("fresh", in_new_swarm(new, root_of(THIRD)))
