"""Raw files through the trees: each node writes every published file, bit for bit."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import check

from scenarios.harness.swarm import Swarm, swarm_in

pytestmark = pytest.mark.slow


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    with swarm_in(tmp_path) as swarm:
        yield swarm


def test_a_file_reaches_every_node(swarm: Swarm, tmp_path: Path) -> None:
    swarm.seed(None, "--raw-mb", "8")
    ticket = swarm.ticket()
    outs = [tmp_path / f"out{i}" for i in range(2)]
    for i, out in enumerate(outs):
        swarm.node(f"node{i}", ticket, "--raw-out", str(out))
    swarm.until("seed", lambda state: len(state["nodes"]) == 2)
    for number in range(2):
        file = tmp_path / f"file{number}"
        file.write_bytes(b"some file or other, %d " % number * 200_000)
        report = swarm.json("seed", "publish", str(file), "--raw", "--wait")
        assert report["version"] == number + 1
        deadline = time.monotonic() + 30.0
        while any(not out.exists() or out.read_bytes() != file.read_bytes() for out in outs):
            assert time.monotonic() < deadline, "a node did not write the file"
            time.sleep(0.1)
    (tmp_path / "large").write_bytes(bytes(9_000_000))
    check(swarm.command("seed", "publish", str(tmp_path / "large"), "--raw"), 2, "at most 8,000,000")
