"""Standby seeds as processes: a seed is killed, its home is deleted, and a standby goes on with all that counted."""

import shutil
import sqlite3
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from kit import all_hold, check, checkpoint, holds, root_of, step, weights
from memory_kit import step as model_step

from node import Swarm as Trainer
from node.engines.base import SamplingParams
from node.host.port import free_port
from node.status.schema import SeedStatus
from scenarios.harness.swarm import LOOPBACK, STARTED_WITHIN_S, Swarm, swarm_in

pytestmark = pytest.mark.slow

MACHINES = ("seed", "standby1", "standby2")
FIRST = weights(tensors=6, elements=40_000)


class Council:
    """A seed and two standbys of one swarm."""

    def __init__(self, swarm: Swarm, base: Path) -> None:
        self.swarm, self.base = swarm, base
        self.ports = {name: free_port() for name in MACHINES}
        self.council: list[str] = []
        for name in MACHINES:
            id_ = swarm.json(name, "council-id")["council_id"]
            self.council += ["--council", f"{id_}@127.0.0.1:{free_port()}"]

    def listen(self, name: str) -> tuple[str, ...]:
        return ("--listen", f"127.0.0.1:{self.ports[name]}")

    @property
    def seed_words(self) -> tuple[str, ...]:
        return ("seed", "--base", str(self.base), "--preset", "loopback", *self.listen("seed"), *self.council)

    def start(self) -> None:
        """Start all three; return when the seed serves."""
        self.swarm.start("seed", *self.seed_words)
        self.swarm.until_there("seed", "contact.json")
        for name in MACHINES[1:]:
            shutil.copy(self.swarm.home("seed") / "authority.key", self.swarm.home(name))
            self.standby(name)
        self.swarm.wait("the seed leads", lambda: self.swarm.status("seed"), STARTED_WITHIN_S, of=["seed"])

    def standby(self, name: str) -> None:
        words = ("--name", name, "--model", str(self.base), *self.listen(name), *self.council)
        self.swarm.start(name, "standby", self.ticket(), *words)

    def ticket(self, name: str = "seed") -> str:
        """A ticket that leads to every machine of the council."""
        announce = [word for port in self.ports.values() for word in ("--announce", f"127.0.0.1:{port}")]
        return self.swarm.ticket("--nodes", "9", *announce, name=name)

    def leader(self, *names: str) -> str:
        """Wait until one of these machines leads; its name."""
        found: list[str] = []

        def leads() -> bool:
            found[:] = [name for name in names if isinstance(self.swarm.status(name), SeedStatus)]
            return bool(found)

        self.swarm.wait("a machine leads", leads, of=names)
        return found[0]


def lose_seed(swarm: Swarm) -> float:
    """Kill the seed and delete its home; when."""
    swarm.kill("seed")
    killed_at = time.monotonic()
    shutil.rmtree(swarm.home("seed"))
    return killed_at


def test_versions_go_on_after_the_seed_and_its_disk_are_lost(tmp_path: Path) -> None:
    second = step(FIRST, 1)
    third = step(second, 2)
    fourth = step(third, 3)
    with swarm_in(tmp_path / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        council = Council(swarm, checkpoint(tmp_path / "base", FIRST))
        council.start()
        swarm.node("node", council.ticket(), "--name", "node", "--model", str(council.base))
        swarm.until("seed", all_hold((0, 0), 3))
        swarm.publish(checkpoint(tmp_path / "one", second), "--wait")
        received = swarm.state("node")["nodes"][0]["received_bytes"]
        (tmp_path / "optimizer.pt").write_bytes(bytes(range(256)) * 10_000)
        assert swarm.json("seed", "keep", str(tmp_path / "optimizer.pt"), "--name", "optimizer")["bytes"] == 2_560_000
        check(swarm.command("standby1", "keep", str(tmp_path / "optimizer.pt")), 2, "stands by")

        killed_at = lose_seed(swarm)
        leader = council.leader("standby1", "standby2")
        assert time.monotonic() - killed_at < 15.0
        other = "standby2" if leader == "standby1" else "standby1"
        swarm.wait("the kept file is here", lambda: swarm.json(leader, "kept")[0]["here"], of=[leader])
        swarm.json(leader, "kept", "optimizer", str(tmp_path / "back.pt"))
        assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "optimizer.pt").read_bytes()
        check(swarm.command(leader, "kept", "other", str(tmp_path / "no")), 2, "keeps no 'other'; it keeps: optimizer")
        swarm.until(leader, lambda state: state["head"] == [0, 1])
        swarm.until(leader, lambda state: {"node", other} <= {node["name"] for node in state["nodes"]})
        swarm.publish(checkpoint(tmp_path / "two", third), "--wait", name=leader)
        swarm.until("node", holds(root_of(third)))
        assert swarm.state("node")["nodes"][0]["received_bytes"] - received < sum(t.nbytes for t in FIRST)

        taken = swarm.json(other, "takeover")
        assert taken["seconds"] < 15.0
        assert council.leader(other) == other
        check(swarm.command(other, "takeover"), 2, "leads the swarm already")
        swarm.until(other, lambda state: {"node", leader} <= {node["name"] for node in state["nodes"]})
        swarm.publish(checkpoint(tmp_path / "three", fourth), "--wait", name=other)
        swarm.until("node", holds(root_of(fourth)))
        swarm.until(leader, holds(root_of(fourth)))


@pytest.mark.long
def test_a_seed_that_comes_back_stands_by(tmp_path: Path) -> None:
    second = step(FIRST, 1)
    with swarm_in(tmp_path / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        council = Council(swarm, checkpoint(tmp_path / "base", FIRST))
        council.start()
        swarm.until("seed", all_hold((0, 0), 2))
        assert swarm.signal("seed") == 143
        leader = council.leader("standby1", "standby2")
        swarm.until(leader, lambda state: len(state["nodes"]) > 1)
        swarm.publish(checkpoint(tmp_path / "one", second), name=leader)
        check(swarm.command("seed", *council.seed_words), 2, "leads this swarm now. Run swarm-node standby here")
        council.standby("seed")
        swarm.until("seed", holds(root_of(second)))
        alone = swarm.command("other", *council.seed_words)
        check(alone, 2, "--council does not list this machine, whose id is 12D3Koo")


@pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")
def test_no_accepted_rollout_is_lost_or_counted_twice(tmp_path: Path) -> None:
    from node.trainers.grpo.tiny import TinyRecipe
    from node.trainers.grpo.warmup import random_model, save_bf16

    base = tmp_path / "base"
    save_bf16(random_model(TinyRecipe(vocabulary=64, hidden=64, inner=96, layers=2, seed=1)), base)
    prompts, sampling = [[1, 2, number] for number in range(3, 43)], SamplingParams(max_tokens=48, seed=5)
    with swarm_in(tmp_path / "swarm", patience_s=STARTED_WITHIN_S) as swarm:
        council = Council(swarm, base)
        council.start()
        engine = ("--device", "cpu", "--threads", "1", *LOOPBACK, "--name", "node", "--model", str(base))
        swarm.start("node", "join", council.ticket(), *engine)
        swarm.until_seed("the engine runs", lambda seed: any(node.engine for node in seed.nodes))
        swarm.publish(model_step(base, tmp_path / "one", 1), "--wait")

        before: dict[int, list[tuple[int, ...]]] = {}
        with Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
            for group in trainer.rollouts(prompts, 2, sampling, key="step 1", timeout_s=60):
                before[group.index] = [sample.token_ids for sample in group.rollouts]
                if len(before) == 8:
                    break
        accepted = swarm.state("node")["nodes"][0]["work"]["accepted"]
        assert accepted >= 16
        killed_at = lose_seed(swarm)
        leader = council.leader("standby1", "standby2")
        assert time.monotonic() - killed_at < 15.0

        book = sqlite3.connect(f"file:{swarm.home(leader) / 'ledger.sqlite'}?mode=ro", uri=True)
        (kept,) = book.execute("select count(*) from rollouts").fetchone()
        assert kept >= accepted, "a rollout that was acknowledged is on the standby"
        with Trainer.attach(home=swarm.home(leader), start=False) as trainer:
            stream = trainer.rollouts(prompts, 2, sampling, key="step 1", timeout_s=120)
            after = {group.index: [sample.token_ids for sample in group.rollouts] for group in stream}
        assert sorted(after) == list(range(len(prompts)))
        assert {index: after[index] for index in before} == before, "what was handed over is handed over again"
        rows = book.execute("select grp, sample, count(*) from rollouts group by grp, sample").fetchall()
        assert len(rows) == 2 * len(prompts)
        assert {count for *_, count in rows} == {1}
