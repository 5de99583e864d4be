"""Joining, leaving, kick, revoke and quotas, with real processes and the command line alone.

The swarm uses the `wan` preset, in which a lease expires after 90 s, longer than any wait here. So a lease that ends
in a test was ended, and did not expire.
"""

import json
import signal
from pathlib import Path

import pytest
from kit import check, checkpoint, holds, root_of, step, weights

from scenarios.harness.processes import PATIENCE_S
from scenarios.harness.swarm import Swarm, swarm_in

pytestmark = pytest.mark.slow

FIRST = weights(tensors=12, elements=40_000)
SECOND = step(FIRST, 1)


@pytest.fixture
def swarm(tmp_path: Path):
    """A seed at version 0 with the `wan` preset."""
    with swarm_in(tmp_path) as swarm:
        swarm.seed(checkpoint(tmp_path / "base", FIRST), "--preset", "wan")
        yield swarm
        for path in tmp_path.glob("*.log"):
            assert "Traceback" not in path.read_text(errors="replace"), path
            assert "lease_expired" not in path.read_text(errors="replace"), path


def members(swarm: Swarm, names: set[str]) -> None:
    """Wait until these are the seed's members."""
    swarm.until("seed", lambda state: {node["name"] for node in state["nodes"]} == names)


def test_sigterm_frees_the_slot_and_kick_and_revoke_end_leases_at_once(swarm: Swarm, tmp_path: Path) -> None:
    ours, theirs = swarm.json("seed", "invite", "--nodes", "3"), swarm.json("seed", "invite", "--nodes", "3")
    base = str(tmp_path / "base")
    for name, ticket in (("box", ours), ("spot", ours), ("rented", theirs), ("lent", theirs)):
        swarm.node(name, ticket["ticket"], "--name", name, "--model", base)
    for name in ("box", "spot", "rented", "lent"):
        swarm.until(name, holds(root_of(FIRST)))
    members(swarm, {"box", "spot", "rented", "lent"})

    assert swarm.signal("spot", signal.SIGTERM) == 143
    members(swarm, {"box", "rented", "lent"})
    swarm.until_logged("seed", '"member_left"')

    # A kicked node says so, and is not admitted again for now; other members stay.
    assert len(swarm.json("seed", "kick", "box")["put_out"]) == 1
    assert swarm.ends("box") == 2
    assert "expelled this machine" in swarm.log("box")
    check(swarm.command("box", "join", ours["ticket"], *("--engine", "none")), 2, "expelled this machine")
    check(swarm.command("seed", "kick", "box"), 2, "No node 'box'")
    members(swarm, {"rented", "lent"})

    # A machine is revoked by name and by PeerId, and the revocation is undone.
    (peer,) = swarm.json("seed", "revoke", "rented")["put_out"]
    assert swarm.ends("rented") == 2
    assert swarm.json("seed", "revoke", peer) == {"changed": False, "put_out": []}
    assert swarm.json("seed", "revoke", peer, "--undo") == {"changed": True, "put_out": []}
    swarm.node("rented", theirs["ticket"], "--name", "rented")
    members(swarm, {"rented", "lent"})

    # A ticket is revoked with all machines that it admitted, also after a restart of the seed.
    revoked = swarm.json("seed", "revoke", theirs["ticket"])
    assert (revoked["changed"], len(revoked["put_out"])) == (True, 2)
    assert {swarm.ends("rented"), swarm.ends("lent")} == {2}
    assert "has been revoked" in swarm.log("lent")
    members(swarm, set())
    (shown,) = [ticket for ticket in swarm.json("seed", "revoke")["tickets"] if ticket["revoked"]]
    assert set(shown["peers"]) == set(revoked["put_out"])
    assert swarm.signal("seed", signal.SIGKILL) == -9
    # The same commands while no seed runs: the first ticket is revoked, and the next seed refuses it.
    assert {t["id"]: t["revoked"] for t in swarm.json("seed", "revoke")["tickets"]}[shown["id"]]
    assert swarm.json("seed", "revoke", ours["ticket"]) == {"changed": True, "put_out": []}
    swarm.seed(tmp_path / "base", "--preset", "wan", *swarm_at(theirs["addrs"]))
    check(swarm.command("spot", "join", ours["ticket"], "--engine", "none"), 2, "has been revoked")
    # The kick still lasts, and applies with every ticket.
    check(swarm.command("box", "join", swarm.ticket(), "--engine", "none"), 2, "expelled this machine")
    check(swarm.command("lent", "join", theirs["ticket"], "--engine", "none"), 2, "has been revoked")
    assert [t["revoked"] for t in swarm.json("seed", "revoke")["tickets"] if t["id"] == shown["id"]] == [True]


def swarm_at(addrs: list[str]) -> tuple[str, str]:
    """The seed's flags for the address that a ticket names."""
    _, _, host, _, port = addrs[0].split("/")
    return "--listen", f"{host}:{port}"


def test_a_machine_that_exceeds_its_tickets_quota_is_removed_with_a_reason(swarm: Swarm, tmp_path: Path) -> None:
    """The model has 960 kB: the quota of one ticket is larger, that of another half of it."""
    swarm.node("whole", swarm.ticket("--quota-gb", "0.002"), "--name", "whole")
    swarm.until("whole", holds(root_of(FIRST)))
    swarm.until("seed", lambda state: any(t["fetched_bytes"] >= 960_000 for t in state["tickets"]))
    small = swarm.ticket("--quota-gb", "0.0005", "--nodes", "5")
    swarm.start("half", "join", small, "--engine", "none", "--listen", "127.0.0.1:0", "--name", "half")
    assert swarm.ends("half") == 2
    assert "used up" in swarm.log("half")
    check(swarm.command("other", "join", small, "--engine", "none"), 2, "used up")
    (ticket,) = [t for t in swarm.state("seed")["tickets"] if t["quota_bytes"] == 500_000]
    assert ticket["fetched_bytes"] > 500_000
    members(swarm, {"whole"})


def test_a_node_at_its_daily_upload_limit_is_a_leaf_also_after_a_restart(swarm: Swarm, tmp_path: Path) -> None:
    base, ticket = str(tmp_path / "base"), swarm.ticket("--nodes", "3")
    little = ("--name", "little", "--model", base, "--up-gb-day", "0.000001")
    swarm.node("little", ticket, *little)
    swarm.until("little", lambda state: state["nodes"][0].get("uplink_today", {}).get("spent", False))
    swarm.until("seed", lambda state: [node["saving"] for node in state["nodes"]] == [True])
    assert swarm.signal("little", signal.SIGKILL) == -9
    swarm.node("little", ticket, *little)
    swarm.node("other", ticket, "--name", "other", "--model", base)
    state = swarm.until("little", lambda state: state["nodes"][0].get("uplink_today", {}).get("spent", False))
    assert "passes nothing on until" in state["message"]
    swarm.until("seed", lambda state: sorted(node["saving"] for node in state["nodes"]) == [False, True])
    swarm.publish(checkpoint(tmp_path / "step_1", SECOND), "--wait")
    for name in ("little", "other"):
        swarm.until(name, holds(root_of(SECOND)))
    state = swarm.state("seed")
    (leaf,) = [node["slot"] for node in state["nodes"] if node["saving"]]
    assert not any(parent == leaf for stripe in state["stripes"] for parent in stripe.values())
    assert swarm.state("little")["nodes"][0]["pushed_bytes"] == 0
    kept = json.loads((swarm.home("little") / "uplink-today.json").read_bytes())
    assert kept["spent_bytes"] >= 1000, PATIENCE_S
