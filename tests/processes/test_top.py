"""`swarm-node top` in a real terminal: it outlives a restart of the seed, follows the terminal's size, and ends."""

from pathlib import Path

import pytest
from kit import checkpoint, step, weights
from pty_kit import InTerminal

from scenarios.harness.swarm import swarm_in

pytestmark = pytest.mark.slow
CLEARED = "\x1b[2J"


def test_top_and_the_gateway_outlive_a_restart_of_the_seed(tmp_path: Path) -> None:
    words = weights(tensors=2)
    base, following = checkpoint(tmp_path / "base", words), checkpoint(tmp_path / "next", step(words, 1))
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        home = swarm.home("seed")
        with (
            InTerminal("top", home=home, columns=80, rows=24) as top,
            InTerminal("gateway", "--at", "127.0.0.1:0", home=home) as gateway,
        ):
            gateway.until("Serving policy")
            top.until("Version 0 is sealed, and no node has joined yet")
            top.until("q: end")
            swarm.node("box", swarm.ticket(), "--name", "box-7")
            top.until("box-7 has version 0")
            swarm.kill("seed")
            top.until("It does not answer now; this was its state before")
            assert top.process.poll() is None
            swarm.seed(base)
            gateway.until("The seed is back")
            swarm.publish(following, "--step", "17")
            top.until("has version 1")
            assert top.raw.count(CLEARED) == 1, "it was drawn anew without need, which flickers"
            since = len(top.raw)
            top.resize(200, 50)
            top.until("e encoded, f first node, h half, l last", since=since)
            assert top.raw.count(CLEARED) == 2
            top.press("q")
            assert top.ends() == 0
            gateway.press("\x03")
            assert gateway.ends() == 130
            assert "Traceback" not in gateway.text
        assert top.raw.endswith("\x1b[?25h\x1b[?1049l"), "the cursor and the old screen are back"


def test_top_ends_with_ctrl_c_and_says_when_nothing_runs(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.seed(checkpoint(tmp_path / "base", weights(tensors=2)))
        with InTerminal("top", home=swarm.home("seed")) as top:
            top.until("q: end")
            top.press("\x03")
            assert top.ends() == 130
            assert "Traceback" not in top.text
        with InTerminal("top", home=tmp_path / "nobody") as top:
            assert top.ends() == 3
            assert "No swarm process answers in" in top.text
        piped = swarm.command("seed", "top")
        assert piped.code == 2
        assert "needs a terminal" in piped.err
