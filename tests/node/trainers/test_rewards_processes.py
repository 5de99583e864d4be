"""Rewards on real nodes, of which one lies: the trainer finds it by its own function, and other nodes by theirs."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from node import PromptSpec, RolloutGroup, SamplingParams, Swarm
from node.rewards.local import LocalReward
from scenarios.harness.swarm import LOOPBACK, State, swarm_in

SAMPLING = SamplingParams(max_tokens=12, stop_tokens=(27,))
HONEST = """
import time

def hangs(prompt, completion, metadata):
    time.sleep(600)

def letters(prompt, completion, metadata):
    return metadata["weight"] * (sum(map(ord, prompt + completion)) % 7) / 7

letters.swarm_version = "1"
"""
LIAR = """
def letters(prompt, completion, metadata):
    return 1.0

letters.swarm_version = "1"
"""


def letters(prompt: str, completion: str, metadata: Mapping[str, Any]) -> float:
    """As the honest nodes have it."""
    return metadata["weight"] * (sum(map(ord, prompt + completion)) % 7) / 7


def specs(weights: Iterable[float]) -> list[PromptSpec]:
    return [PromptSpec([4, 5], reward_metadata={"weight": weight}, metadata=weight) for weight in weights]


def assert_right(groups: list[RolloutGroup], base: Path, count: int) -> None:
    assert len(groups) == count
    local = LocalReward(letters, base)
    for group in groups:
        metadata = f'{{"weight":{group.metadata}}}'.encode()
        for rollout in group.rollouts:
            assert rollout.reward == local.outcome(group.prompt, rollout.token_ids, metadata).value
            assert rollout.reward_checked


@pytest.mark.slow
def test_a_node_that_lies_about_rewards_is_found_and_its_samples_are_replaced(tmp_path: Path, base: Path) -> None:
    for name, text in (("honest", HONEST), ("liar", LIAR)):
        (tmp_path / f"{name}.py").write_text(text)
    with swarm_in(tmp_path / "swarm") as processes:
        processes.seed(base)
        ticket = processes.ticket("--nodes", "3")

        def start(name: str, functions: str) -> None:
            words = ("--model", str(base), "--name", name, "--threads", "1")
            reward = ["--reward", f"letters={tmp_path / functions}.py:letters"]
            if functions == "honest":
                reward += ["--reward", f"hangs={tmp_path / functions}.py:hangs", "--reward-within", "5s"]
            processes.start(name, "join", ticket, *LOOPBACK, *words, *reward, OMP_NUM_THREADS="1")

        def quarantine(state: State) -> dict[str, str]:
            return {node["name"]: node["quarantine"]["why"] for node in state["nodes"] if node.get("quarantine")}

        start("one", "honest")
        start("liar", "liar")
        with Swarm.attach(base=base, home=processes.home("seed"), start=False) as swarm:
            swarm.wait_ready(2, timeout_s=120)
            groups = list(
                swarm.rollouts(specs(range(1, 13)), 4, SAMPLING, reward=letters, verify_rewards=0.1, timeout_s=60)
            )
            assert_right(groups, base, 12)  # type: ignore[arg-type]
            why = quarantine(processes.state("seed"))
            assert why.keys() == {"liar"}
            assert "the trainer's own computation: its reward is" in why["liar"]

            assert processes.command("seed", "quarantine", "liar", "--release").code == 0
            start("two", "honest")
            swarm.wait_ready(3, timeout_s=120)
            found: list[RolloutGroup] = []
            for round_ in range(8):
                weights = range(100 * (round_ + 1), 100 * (round_ + 1) + 8)
                found = list(swarm.rollouts(specs(weights), 4, SAMPLING, reward="letters", timeout_s=60))  # type: ignore[arg-type]
                assert_right(found, base, 8)
                if why := quarantine(processes.state("seed")):
                    break
            assert why.keys() == {"liar"}
            assert "are not those that other nodes compute" in why["liar"]
            rewards = processes.state("seed")["work"]["rewards"]
            assert list(rewards["functions"]["letters"].values()) == [2], "the one in quarantine does not count"
            assert rewards["checked"] > 0
            own = processes.state("one")["nodes"][0]["work"]
            assert own["rewards"] > 0
            assert own["rewards_failed"] == 0

            (group,) = swarm.rollouts([[4, 5]], 2, SAMPLING, reward="hangs", timeout_s=60)
            assert [(rollout.reward, rollout.no_reward) for rollout in group.rollouts] == [
                (None, "it took more than 5 s")
            ] * 2  # fmt: skip
            (group,) = swarm.rollouts(specs([1.0]), 2, SAMPLING, reward="letters", timeout_s=60)
            assert all(rollout.reward_checked for rollout in group.rollouts)
