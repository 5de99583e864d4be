"""Mistakes and accidents of a person at a prompt: each ends with a sentence, and leaves nothing behind."""

import json
import os
import sys
from pathlib import Path

import pytest
from kit import check, checkpoint, step, weights
from pty_kit import InTerminal

from node.tools.talking_model import write_model
from scenarios.harness.swarm import NODE, swarm_in

pytestmark = pytest.mark.slow


def test_a_watching_seed_ends_with_ctrl_c_without_a_traceback(tmp_path: Path) -> None:
    words = weights(tensors=2)
    base = checkpoint(tmp_path / "base", words)
    (tmp_path / "runs").mkdir()
    line = ("seed", "--base", str(base), "--listen", "127.0.0.1:0", "--preset", "loopback", "--watch-quiet", "1s")
    with InTerminal(*line, "--watch", str(tmp_path / "runs"), home=tmp_path / "home") as seed:
        seed.until("The seed is up")
        checkpoint(tmp_path / "runs" / "step_1", step(words, 1))
        seed.until(r"Version 1 .*is sealed")
        seed.press("\x03")
        assert seed.ends() == 130
        assert "Traceback" not in seed.text
        assert "KeyboardInterrupt" not in seed.text
        assert "ended with code" not in seed.text


def test_a_failed_start_of_a_seed_leaves_no_key(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", weights(tensors=2))
    with swarm_in(tmp_path) as swarm:
        check(swarm.command("seed", "seed", "--base", str(tmp_path / "nothing")), 2, "does not exist")
        swarm.seed(base, "--listen", "127.0.0.1:0", name="first")
        port = swarm.state("first")["addrs"][0].rsplit("/", 1)[1]
        taken = swarm.command("seed", "seed", "--base", str(base), "--listen", f"127.0.0.1:{port}")
        assert taken.code != 0
        left = [path.name for path in swarm.home("seed").glob("*")] if swarm.home("seed").exists() else []
        assert not [name for name in left if name.endswith(".key") or name.startswith("swarm-")], left
        assert (swarm.home("first") / "authority.key").exists()
        swarm.signal("first")
        swarm.seed(base, name="first")  # a later failure would not remove a key that is in use
        assert (swarm.home("first") / "authority.key").exists()


def test_a_gpu_that_is_not_there_ends_with_a_sentence(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        device, says = "cuda:63", "GPUs, counted from cuda:0"
    else:
        device, says = "cuda", "torch finds no GPU here"
    write_model(tmp_path / "model")
    with swarm_in(tmp_path) as swarm:
        swarm.seed(tmp_path / "model")
        joined = ("join", swarm.ticket(), "--model", str(tmp_path / "model"), "--listen", "127.0.0.1:0")
        check(swarm.command("box", *joined, "--device", device, within_s=120.0), 2, says)


def test_files_of_the_user_do_not_hide_the_programs_packages(tmp_path: Path) -> None:
    """In a folder with a node.py of the user's, commands and the processes that they start work."""
    write_model(tmp_path / "model")
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("node", "swarm", "codec"):
        (mine / f"{name}.py").write_text("raise SystemExit('a file of the user was imported')\n")
    with swarm_in(tmp_path) as swarm:
        swarm.seed(tmp_path / "model")
        ticket = swarm.ticket()
        code = f"import sys, os; os.chdir({str(mine)!r}); sys.argv[0] = 'swarm-node'; from node.cli import main; main()"
        arguments = ("join", ticket, "--model", str(tmp_path / "model"), "--listen", "127.0.0.1:0")
        with InTerminal(*arguments, command=(sys.executable, "-P", "-c", code), home=tmp_path / "box") as box:
            box.until("Ready: generating with version 0", 120.0)
        assert "of the user was imported" not in (tmp_path / "box" / "engine.log").read_text()


def test_a_swarm_over_ipv6(tmp_path: Path) -> None:
    words = weights(tensors=2)
    base = checkpoint(tmp_path / "base", words)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base, "--listen", "[::1]:0", "--metrics", "[::1]:0")
        ticket = swarm.json("seed", "invite")
        assert ticket["addrs"][0].startswith("/ip6/::1/tcp/")
        swarm.start("box", "join", ticket["ticket"], *NODE[:2], "--listen", "[::1]:0")
        swarm.until("seed", lambda state: bool(state["nodes"]) and state["nodes"][0]["held"] == [0, 0])
        page = next(json.loads(line)["page"] for line in swarm.log("seed").splitlines() if '"monitor"' in line)
        assert page.startswith("http://[::1]:")
        with InTerminal("gateway", "--at", "[::1]:0", home=swarm.home("seed")) as gateway:
            gateway.until(r"http://\[::1\]:\d+/v1")
    assert os.path.exists(tmp_path / "seed" / "authority.key")
