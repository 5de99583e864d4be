"""As processes: a seed that lost its saved state, and a standby that takes over, look after the nodes' fragments."""

import random
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from kit import all_hold, checkpoint, weights
from test_standby import Council, lose_seed

from node.host.port import free_port
from scenarios.harness.swarm import STARTED_WITHIN_S, State, Swarm, swarm_in

pytestmark = pytest.mark.slow

FIRST = weights(tensors=6, elements=40_000)
NODES = ("node0", "node1", "node2", "node3")
PLACED_WITHIN_S = 240.0
"""A seed looks once a minute which fragments are held."""


def saved_file(folder: Path) -> Path:
    """A state of two segments in each of four fragments."""
    path = folder / "optimizer.pt"
    path.write_bytes(random.Random(5).randbytes(20_000_000))
    return path


def is_whole(step: int, fragments: int) -> Any:
    def met(state: State) -> bool:
        found = [(each["step"], each["whole"], each["held"]) for each in state["saved_states"]]
        return found == [(step, True, fragments)]

    return met


def fragments_at(swarm: Swarm, name: str) -> list[str]:
    return sorted(path.name for path in swarm.home(name).glob("swarm-*/state/*/*.fragment"))


def rescue(swarm: Swarm, key: Path, out: Path, *names: str, of: dict[str, int]) -> bytes:
    words = [word for name in names for word in ("--node", f"127.0.0.1:{of[name]}")]
    swarm.json("new", "rescue", "--state", str(out), "--key", str(key), *words)
    return out.read_bytes()


@pytest.mark.long
def test_a_seed_that_lost_its_saved_state_adopts_it_and_replaces_a_lost_nodes_fragment(tmp_path: Path) -> None:
    base, file = checkpoint(tmp_path / "base", FIRST), saved_file(tmp_path)
    at = {name: free_port() for name in ("seed", *NODES, "spare")}
    with swarm_in(tmp_path / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        listen = ("--listen", f"127.0.0.1:{at['seed']}")
        swarm.seed(base, *listen)
        ticket = swarm.ticket("--nodes", "9")

        def join(name: str) -> None:
            words = ("--engine", "none", "--listen", f"127.0.0.1:{at[name]}", "--name", name, "--model", str(base))
            swarm.start(name, "join", ticket, *words)

        for name in NODES:
            join(name)
        swarm.until_seed("they joined", lambda seed: len(seed.nodes) == len(NODES))
        saved = swarm.json("seed", "save-state", str(file), "--step", "7")
        assert (saved["needed"], saved["fragments"]) == (2, 4)
        before = {name: fragments_at(swarm, name) for name in NODES}
        assert sorted(chain(*before.values())) == [f"{number}.fragment" for number in range(4)]

        swarm.kill("seed")
        shutil.rmtree(swarm.home("seed") / "state")
        swarm.seed(base, *listen)
        swarm.until_event("seed", "state_adopted", within_s=PLACED_WITHIN_S, step=7, fragments=4)
        swarm.until("seed", is_whole(7, 4), PLACED_WITHIN_S)
        assert {name: fragments_at(swarm, name) for name in NODES} == before, "no fragment has moved"

        join("spare")
        swarm.until_seed("it joined", lambda seed: "spare" in {node.name for node in seed.nodes})
        swarm.kill("node1")
        wanted = before["node1"]
        swarm.wait("its fragment is at another node", lambda: fragments_at(swarm, "spare") == wanted, PLACED_WITHIN_S)
        swarm.until("seed", is_whole(7, 4), PLACED_WITHIN_S)

        key = tmp_path / "kept.key"
        shutil.copy(swarm.home("seed") / "authority.key", key)
        for name in ("seed", "node0", "node2"):
            swarm.kill(name)
        assert rescue(swarm, key, tmp_path / "back.pt", "node3", "spare", of=at) == file.read_bytes()


def test_a_standby_that_takes_over_looks_after_the_saved_state(tmp_path: Path) -> None:
    file = saved_file(tmp_path)
    with swarm_in(tmp_path / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        council = Council(swarm, checkpoint(tmp_path / "base", FIRST))
        council.start()
        at = {"node": free_port()}
        words = ("--engine", "none", "--listen", f"127.0.0.1:{at['node']}", "--name", "node")
        swarm.start("node", "join", council.ticket(), *words, "--model", str(council.base))
        swarm.until("seed", all_hold([0, 0], 3))  # a standby without the version does not campaign
        saved = swarm.json("seed", "save-state", str(file), "--step", "7")
        assert (saved["needed"], saved["fragments"]) == (2, 3)

        lose_seed(swarm)
        leader = council.leader("standby1", "standby2")
        swarm.until_event(leader, "state_adopted", within_s=PLACED_WITHIN_S, step=7, fragments=3)
        swarm.until(leader, is_whole(7, 3), PLACED_WITHIN_S)
        other = "standby2" if leader == "standby1" else "standby1"
        assert len(fragments_at(swarm, "node")) + len(fragments_at(swarm, other)) == 3, "two nodes are left for them"
        saved_again = swarm.json(leader, "save-state", str(file), "--step", "8")
        assert saved_again["serial"] > saved["serial"]
        swarm.until(leader, is_whole(8, 2), PLACED_WITHIN_S)

        key = tmp_path / "kept.key"
        shutil.copy(swarm.home(leader) / "authority.key", key)
        swarm.kill(leader)
        swarm.kill(other)
        assert rescue(swarm, key, tmp_path / "back.pt", "node", of=at) == file.read_bytes()
