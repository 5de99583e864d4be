"""In a home that every user may enter, only the owner can read the files that the processes write."""

import sqlite3
from pathlib import Path

import pytest
from kit import all_hold, checkpoint, holds, root_of, step, weights

from scenarios.harness.swarm import Swarm, swarm_in

pytestmark = pytest.mark.slow

FIRST = weights(tensors=4, elements=20_000)
SECOND = step(FIRST, 1)


def open_to_others(home: Path) -> list[str]:
    found = (path for path in home.rglob("*") if not path.is_symlink() and path.stat().st_mode & 0o077)
    return sorted(str(path.relative_to(home)) for path in found)


def wide_home(swarm: Swarm, name: str) -> Path:
    home = swarm.home(name)
    home.mkdir()
    home.chmod(0o777)
    return home


def test_homes_of_mode_0777_hold_no_file_that_others_may_read(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        homes = {name: wide_home(swarm, name) for name in ("seed", "node", "relay")}
        # A ledger of an earlier release, which every user can read.
        ledger = sqlite3.connect(homes["seed"] / "ledger.sqlite")
        ledger.execute("pragma journal_mode = wal")
        ledger.close()
        (homes["seed"] / "ledger.sqlite").chmod(0o644)
        assert swarm.command("seed", "keygen").code == 0
        swarm.seed(checkpoint(tmp_path / "base", FIRST))
        ticket = swarm.ticket()
        swarm.node("node", ticket, "--up-gb-day", "1")
        swarm.start("relay", "relay", ticket, "--listen", "127.0.0.1:0")
        swarm.until("node", holds(root_of(FIRST)))
        swarm.publish(checkpoint(tmp_path / "one", SECOND), "--wait")
        swarm.until("node", holds(root_of(SECOND)))
        swarm.until("seed", all_hold((0, 1), 2))
        assert {name: open_to_others(home) for name, home in homes.items()} == {"seed": [], "node": [], "relay": []}
        assert (homes["seed"] / "trainer.sock").exists()
        assert swarm.log("seed", 1 << 20).count("could be read by other users") == 1
