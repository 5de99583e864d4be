"""Real processes on emulated links, in short form; `scenarios.emulator.wan_table` makes the published numbers."""

from dataclasses import replace

import pytest

from scenarios.emulator.floor import pass_on
from scenarios.emulator.network import Network
from scenarios.emulator.real import Node, RealSwarm
from scenarios.emulator.wan_table import ROWS, measure, row_of

pytestmark = [pytest.mark.wan, pytest.mark.alone]


def test_a_file_reaches_two_regions_and_crosses_the_border_once() -> None:
    nodes = (Node(100, region="eu"), Node(100, region="us"), Node(100, region="us", firewall="in"))
    case = replace(ROWS["regions"], seed=Node(100, region="eu"), nodes=nodes, payload_bytes=4 << 20)
    (outcome,) = measure(case, 1)
    assert outcome.had_s.keys() == {"node0", "node1", "node2"}
    assert outcome.payload_bytes == pytest.approx(4 << 20, rel=0.05)
    assert 1.0 < outcome.copies < 1.5  # a star sends three copies; 1.007 on an otherwise idle machine
    assert set(outcome.crossings) == {"eu", "us"}
    assert 1.0 < outcome.crossings["us"] < 1.5  # one copy with its headers, for two nodes there
    assert row_of("regions", case, [outcome])["nodes"] == 3


def test_plain_sockets_along_the_same_trees() -> None:
    floor = pass_on([200, 200], 200, 2 << 20)
    assert floor.seconds > 0.9 * floor.bound_s
    assert 1.0 < floor.copies < 1.1


@pytest.mark.long
def test_chunks_lost_with_a_root_child_are_sent_again_within_the_cap() -> None:
    node = Node(100)
    with RealSwarm.started(Network(), node, [node] * 3, 34, seed_flags=("--egress-copies", "1.3")) as swarm:
        outcome = swarm.send(32 << 20, at_half=lambda swarm: swarm.kill(swarm.interior()))
    assert len(outcome.had_s) == 2, "both live nodes have the version"
    assert outcome.sent_bytes < 1.35 * outcome.payload_bytes  # the cap counts payload only
