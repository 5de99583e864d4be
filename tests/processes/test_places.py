"""Where the replica is, and how changes are coded: a seed that codes by position, nodes that keep no copy in memory."""

import signal
from pathlib import Path

import pytest
from kit import all_hold, check, checkpoint, holds, root_of, step, swarm_in, weights

from codec.chunk import CODER_PCO, CODER_RAW
from node.endpoint import open_store
from node.ticket import Ticket

VERSIONS = [weights()]
for number in (1, 2, 3):
    VERSIONS.append(step(VERSIONS[-1], number))


@pytest.mark.slow
def test_replicas_on_disk_and_nowhere_with_changes_coded_by_position(tmp_path: Path) -> None:
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
        assert any(swarm.home("disk").glob("swarm-*/replica"))
        assert not any(swarm.home("none").glob("swarm-*/replica"))

        # A clean end: what the file holds is believed, and the next version found.
        assert swarm.signal("disk", signal.SIGINT) == 130
        swarm.publish(folders[2])
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.until("disk", holds(root_of(VERSIONS[2])))

        # No end at all.
        assert swarm.signal("disk", signal.SIGKILL) == -9
        swarm.publish(folders[3])
        swarm.node("disk", ticket, "--replica", "disk")
        swarm.until("disk", holds(root_of(VERSIONS[3])))

        # And back to memory.
        assert swarm.signal("disk", signal.SIGTERM) == 143
        swarm.node("disk", ticket, "--replica", "ram")
        swarm.until("disk", holds(root_of(VERSIONS[3])))
        assert not any(swarm.home("disk").glob("swarm-*/replica"))
        assert swarm.signal("disk", signal.SIGTERM) == 143

        with open_store(swarm.home("disk"), Ticket.parse(ticket).authority) as store:
            coders = {entry.coder for chunk in store.chunks.all() for entry in chunk.header.blocks}
        assert coders <= {CODER_PCO, CODER_RAW}
        assert CODER_PCO in coders


def test_an_engine_needs_a_replica(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        check(swarm.command("a", "join", "swarm1x", "--replica", "none"), 2, "--engine none")
