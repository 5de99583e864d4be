"""`swarm-node doctor` on emulated hosts: it names the kind of NAT, a slow link, and a firewall that
drops everything."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kit import all_hold, checkpoint, ticket_of, weights
from msgspec.structs import replace

from codec.sign import Key
from node.settings.ticket import Ticket
from scenarios.emulator.network import Network
from scenarios.harness.swarm import swarm_in

pytestmark = [pytest.mark.wan, pytest.mark.alone]

KINDS = {
    "open": ("ok", "the seed reached this machine", ""),
    "in": ("costs", "no NAT", "open the port"),
    "nat": ("costs", "behind a NAT that keeps ports", "open the port"),
    "symmetric": ("costs", "behind a symmetric NAT", "--via THAT-MACHINE:4001"),
}


@pytest.mark.long
def test_each_kind_of_nat_is_named(tmp_path: Path) -> None:
    network = Network(rtt_ms=40)
    trainer = network.host("trainer", up_mbit=200, down_mbit=200)
    member = network.host("member", up_mbit=100, down_mbit=100)
    walled = network.host("walled", firewall="in")
    boxes: list[Any] = [
        network.host(kind, up_mbit=50, down_mbit=50, firewall="none" if kind == "open" else kind)  # type: ignore[arg-type]
        for kind in KINDS
    ]
    slow = network.host("slow", up_mbit=2, down_mbit=2)
    hosts = {host.name: host for host in (trainer, member, walled, slow, *boxes)}
    with network, swarm_in(tmp_path, on=lambda name: hosts[name].popen, patience_s=120.0) as swarm:
        base = checkpoint(tmp_path / "base", weights())
        swarm.start("trainer", "seed", "--base", str(base), "--preset", "lan")
        swarm.until("trainer", lambda state: state["head"] == [0, 0])
        ticket = swarm.json("trainer", "invite")["ticket"]
        swarm.start("member", "join", ticket, "--engine", "none")
        swarm.until("trainer", all_hold([0, 0], 1))
        for kind, (verdict, found, mend) in KINDS.items():
            ended = swarm.command(kind, "doctor", ticket, "--engine", "none", "--json")
            lines = {line["check"]: line for line in json.loads(ended.out)["checks"]}
            assert (lines["address"]["verdict"], ended.code) == (verdict, 0), (kind, ended)
            assert found in lines["address"]["found"], (kind, lines["address"])
            assert mend in lines["address"]["mend"], (kind, lines["address"])
            assert lines["seed"]["verdict"] == lines["neighbour"]["verdict"] == "ok", (kind, lines)
            (rtt_ms,) = map(int, re.findall(r"answers after (\d+) ms", lines["seed"]["found"]))
            assert rtt_ms >= 40, "no shorter than the emulated way"

        ended = swarm.command("slow", "doctor", ticket, "--engine", "none", "--json")
        lines = {line["check"]: line for line in json.loads(ended.out)["checks"]}
        assert lines["rate from the seed"]["verdict"] == lines["neighbour"]["verdict"] == "costs", lines
        assert "the model alone takes" in lines["rate from the seed"]["costs"]

        ended = swarm.command("open", "doctor", _at(walled.address), "--engine", "none", "--json")
        assert ended.code == 1
        lines = {line["check"]: line for line in json.loads(ended.out)["checks"]}
        assert "no answer in 5 s" in lines["seed"]["found"], lines["seed"]
        assert "open the seed's port in its firewall" in lines["seed"]["mend"]


def _at(host: str) -> str:
    """A ticket that leads to this host."""
    ticket = Ticket.parse(ticket_of(Key.generate(), 4001))
    return str(replace(ticket, addrs=(f"/ip4/{host}/tcp/4001",)))
