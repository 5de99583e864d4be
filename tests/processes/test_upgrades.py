"""Processes and homes of other versions, which this version cannot serve: each is refused with a sentence."""

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from kit import check, checkpoint, holds, root_of, weights

from codec.sign import Key
from node.host.port import free_port
from node.settings import keyfile
from scenarios.harness.swarm import LOOPBACK, NODE, Swarm, swarm_in

FIRST = weights(4, 10_000)

LATER_PROTOCOL = """
import sys
from swarm.transport import lanes
from swarm.transport.base import Lane

ids = {Lane.CONTROL: "/swarm-node/control/2", Lane.BULK: "/swarm-node/bulk/2"}
lanes.PROTOCOL_OF.update(ids)
lanes.LANE_OF.clear()
lanes.LANE_OF.update({protocol: lane for lane, protocol in ids.items()})

from node.cli import main

sys.argv[0] = "swarm-node"
sys.exit(main())
"""
"""`swarm-node`, but of a version that speaks another protocol."""


def start_later_version(swarm: Swarm, name: str, *words: str) -> None:
    command = [sys.executable, "-c", LATER_PROTOCOL, *words]
    swarm.start_command(name, command, environment={"SWARM_HOME": str(swarm.home(name))})


@pytest.mark.slow
def test_a_seed_that_speaks_another_protocol_is_named_and_joined_once_it_speaks_ours(tmp_path: Path) -> None:
    base, port = checkpoint(tmp_path / "base", FIRST), free_port()
    serve = ("seed", "--base", str(base), "--listen", f"127.0.0.1:{port}", "--preset", "loopback")
    with swarm_in(tmp_path) as swarm:
        start_later_version(swarm, "seed", *serve)
        swarm.wait("it serves", lambda: swarm.status("seed"), of=["seed"])
        ticket = swarm.ticket("--nodes", "2")
        once = swarm.command("once", "join", ticket, *NODE, "--wait-for-seed", "2s")
        check(once, 3, "does not speak /swarm-node/control/1", "install the same version on both", within_s=30.0)
        swarm.node("box", ticket)
        swarm.until_logged("box", "another version of swarm-node")
        start_later_version(swarm, "later", "join", ticket, *NODE)  # the seed itself is fine
        swarm.until("later", holds(root_of(FIRST)))

        assert swarm.signal("seed") == 143
        swarm.start("seed", *serve)
        swarm.until("box", holds(root_of(FIRST)))


@pytest.mark.parametrize("file", ["swarm.sqlite", "ledger.sqlite"])
@pytest.mark.slow
def test_a_home_that_a_later_version_wrote_is_refused_and_left_as_it_is(tmp_path: Path, file: str) -> None:
    base, key = checkpoint(tmp_path / "base", FIRST), Key(bytes([8]) * 32)
    keyfile.write(tmp_path / "seed" / "authority.key", key)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        assert swarm.signal("seed") == 143
        (path,) = swarm.home("seed").rglob(file)
        with sqlite3.connect(path) as db:
            db.execute("pragma user_version = 99")
        db.close()
        before = path.read_bytes()
        check(swarm.command("seed", "seed", "--base", str(base), *LOOPBACK), 2, "later version of swarm-node")
        assert path.read_bytes() == before


@pytest.mark.slow
def test_a_home_of_a_release_before_formats_were_numbered_is_opened(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", FIRST)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        root = swarm.state("seed")["nodes"]
        assert swarm.signal("seed") == 143
        (path,) = swarm.home("seed").rglob("swarm.sqlite")
        with sqlite3.connect(path) as db:
            assert db.execute("pragma user_version").fetchone() == (1,)
            db.execute("pragma user_version = 0")
        db.close()
        swarm.seed(base)
        assert json.dumps(swarm.state("seed")["nodes"]) == json.dumps(root)
