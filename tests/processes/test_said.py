"""What a seed and a node tell the person who started them, in a terminal and in a pipe."""

import json
import re
import signal
from pathlib import Path

import pytest
from kit import checkpoint, step, weights
from pty_kit import InTerminal

from scenarios.harness.swarm import NODE, swarm_in

pytestmark = pytest.mark.slow


def test_a_seed_and_a_node_say_what_happens_in_sentences(tmp_path: Path) -> None:
    words = weights(tensors=4)
    base, next_step = checkpoint(tmp_path / "base", words), checkpoint(tmp_path / "next", step(words, 1))
    home = tmp_path / "seed"
    start = ("seed", "--base", str(base), "--home", str(home), "--listen", "127.0.0.1:0", "--preset", "loopback")
    log = tmp_path / "seed.log"
    with swarm_in(tmp_path / "others") as others, InTerminal(*start, "--log-file", str(log)) as seed:
        said = seed.until("Next: ")
        assert re.search(r"The seed is up at 127\.0\.0\.1:\d+, with version 0\. Next: swarm-node invite", said)
        ticket = others.command("cli", "invite", "--home", str(home), "--json")
        ticket_text = json.loads(ticket.out)["ticket"]
        with InTerminal("join", ticket_text, *NODE, "--name", "box-7", home=tmp_path / "node") as node:
            node.until("Ready: holding version 0 and passing it on, .* after the start")
            assert re.search(
                r"Looking for the swarm from .*\n.*Reached the swarm: .*\n(.*\n)*.*The model is here, as version 0",
                node.text,
            )
            seed.until(r"box-7 joined \(members: 1\)")
            published = others.command("cli", "publish", str(next_step), "--step", "17", "--home", str(home))
            assert published.code == 0, published
            seed.until(r"Version 1 \(step 17\) is sealed: 2 % of the elements changed, [\d.]+ kB\.")
            seed.until(r"Version 1 is at every node \(1\), [\d.]+ m?s after its publish began")
            assert "Holds version 1" not in node.text
            node.process.send_signal(signal.SIGINT)
            assert node.ends() == 130
            assert node.text.splitlines()[-1].endswith("Stopping; once more to stop at once.")
            assert "{" not in node.text
        seed.until(r"box-7 left: it was stopped \(members: 0\)")
        seed.press("\x03")
        assert seed.ends() == 130
        assert "{" not in seed.text
        assert "Traceback" not in seed.text
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    for name in ("serving", "member_joined", "held", "sealed", "version_arrived", "member_left", "stopping"):
        assert name in events


def test_in_a_pipe_each_line_of_the_log_is_json(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.seed(checkpoint(tmp_path / "base", weights(tensors=2)))
        swarm.node("box", swarm.ticket())
        swarm.until("seed", lambda state: bool(state["nodes"]) and state["nodes"][0]["held"] == [0, 0])
        swarm.until_logged("box", '"ready"')
        for name in ("box", "seed"):
            swarm.signal(name)
            lines = [json.loads(line) for line in swarm.log(name).splitlines()]
            assert lines[-1]["event"] == "stopping"
            assert all({"event", "level", "timestamp"} <= set(line) for line in lines)
