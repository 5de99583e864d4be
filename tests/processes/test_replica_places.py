"""Replicas in memory, on disk or absent; a seed with coder pco; how much a version writes to a node's disk."""

import signal
from pathlib import Path

import pytest
from kit import all_hold, check, checkpoint, holds, root_of, step, weights

from codec.chunk import CODER_PCO, CODER_RAW
from node.host.endpoint import open_store
from node.settings.ticket import Ticket
from scenarios.harness.swarm import swarm_in

VERSIONS = [weights()]
for number in (1, 2, 3):
    VERSIONS.append(step(VERSIONS[-1], number))


@pytest.mark.slow
@pytest.mark.long
def test_disk_replicas_and_relays_with_coder_pco(tmp_path: Path) -> None:
    folders = [checkpoint(tmp_path / f"step_{i}", words) for i, words in enumerate(VERSIONS)]
    with swarm_in(tmp_path) as swarm:
        swarm.seed(folders[0], "--coder", "pco")
        ticket = swarm.ticket()
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.node("none", ticket, "--replica", "none")
        swarm.until("disk", holds(root_of(VERSIONS[0])))
        swarm.until("seed", lambda state: len(state["nodes"]) == 2)
        assert swarm.publish(folders[1], "--wait")["version"] == 1
        swarm.until("disk", holds(root_of(VERSIONS[1])))
        swarm.until("seed", all_hold((0, 1), 2))
        assert swarm.state("none")["role"] == "relay"
        swarm.until_there("disk", "swarm-*/anchors/0.*/anchor.json")
        assert any(swarm.home("disk").glob("swarm-*/chunks/*"))
        assert not any(swarm.home("none").glob("swarm-*/anchors/*"))

        # After a clean end the checkpoint is used without hashing, and the next version is fetched.
        assert swarm.signal("disk", signal.SIGINT) == 130
        swarm.publish(folders[2])
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.until("disk", holds(root_of(VERSIONS[2])))

        # After a kill.
        assert swarm.signal("disk", signal.SIGKILL) == -9
        swarm.publish(folders[3])
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.until("disk", holds(root_of(VERSIONS[3])))

        # A change to memory.
        assert swarm.signal("disk", signal.SIGTERM) == 143
        swarm.node("disk", ticket, "--replica", "ram")
        swarm.until("disk", holds(root_of(VERSIONS[3])))
        assert swarm.signal("disk", signal.SIGTERM) == 143

        with open_store(swarm.home("disk"), Ticket.parse(ticket).authority) as store:
            coders = {entry.coder for chunk in store.chunks.all() for entry in chunk.header.blocks}
        assert coders <= {CODER_PCO, CODER_RAW}
        assert CODER_PCO in coders


def test_an_engine_needs_a_replica(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        check(swarm.command("a", "join", "swarm1x", "--replica", "none"), 2, "--engine none")


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("ram", marks=pytest.mark.long), "disk"])
def test_a_step_costs_a_node_no_more_disk_than_its_delta_and_its_share_of_a_checkpoint(
    tmp_path: Path, place: str
) -> None:
    """Eight steps, so one checkpoint. Counts the bytes that the node's process wrote to disk, also through maps, and
    passed to write() in case the disk is a tmpfs."""
    states, steps, elements = [weights(8, 1 << 20)], 8, 8 << 20
    for number in range(steps + 1):
        states.append(step(states[-1], number, 0.01))
    with swarm_in(tmp_path) as swarm:
        swarm.seed(checkpoint(tmp_path / "base", states[0]))
        swarm.node("a", swarm.ticket(), "--model", str(tmp_path / "base"), "--replica", place)
        # The first version is not counted: the node may write compiled kernels, once per machine.
        swarm.publish(checkpoint(tmp_path / "step_1", states[1]), "--wait")
        swarm.until("a", holds(root_of(states[1])))
        swarm.until_there("a", "swarm-*/anchors/0.*/anchor.json")
        delta_bytes, before = 0, written(swarm.running["a"].pid)
        for number, words in enumerate(states[2:], 2):
            delta_bytes += swarm.publish(checkpoint(tmp_path / f"step_{number}", words), "--wait")["delta_bytes"]
        swarm.until("a", holds(root_of(states[-1])))
        swarm.until_there("a", "swarm-*/anchors/0.[89]/anchor.json")
        spent = [now - then for now, then in zip(written(swarm.running["a"].pid), before, strict=True)]
    checkpoint_bytes, records_bytes = 2 * elements, 100_000
    assert max(spent) < 1.2 * delta_bytes + checkpoint_bytes + steps * records_bytes
    assert delta_bytes < 0.2 * checkpoint_bytes, "otherwise the bound would allow writing the whole model"


def written(pid: int) -> tuple[int, int]:
    """Bytes that a process has passed to write(), and bytes of file pages that it made dirty in any way."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["wchar"]), int(lines["write_bytes"])
