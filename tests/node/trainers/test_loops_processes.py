"""Loops against a real seed and two real nodes: readiness, early stop, evaluation beside training, importance."""

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from node import NodeState, PromptSpec, SamplingParams, Swarm, SwarmTimeout, importance_weights
from scenarios.harness.swarm import LOOPBACK, swarm_in

LONG = SamplingParams(max_tokens=56)
SHORT = SamplingParams(max_tokens=8)


@pytest.mark.slow
def test_a_loop_over_real_nodes(tmp_path: Path, base: Path) -> None:
    with swarm_in(tmp_path) as processes:
        processes.seed(base)
        ticket = processes.ticket("--nodes", "3")
        with Swarm.attach(base=base, home=processes.home("seed"), start=False) as swarm:
            with pytest.raises(SwarmTimeout, match="swarm-node invite"):
                swarm.wait_ready(timeout_s=0.5)
            processes.node("bare", ticket, "--name", "bare")
            for name in ("a", "b"):
                words = ("--model", str(base), "--name", name, "--threads", "1")
                processes.start(name, "join", ticket, *LOOPBACK, *words, OMP_NUM_THREADS="1")
            told: list[str] = []
            found = swarm.wait_ready(2, tokens_per_second=1.0, timeout_s=120, tell=told.append)
            assert {node.name for node in found.nodes if node.state is NodeState.READY} == {"a", "b"}
            assert "0 of 2 nodes are ready" in told[0]
            asked = processes.json("seed", "wait", "--nodes", "2", "--timeout", "10s")
            assert (asked["ready"], [node["state"] for node in asked["nodes"]].count("proving")) == (2, 1)

            # The first groups are taken; nodes stop generating the long ones.
            prompts = [PromptSpec([4 + i], metadata=i) for i in range(4)]
            prompts += [PromptSpec([8 + i], LONG, 500, 4 + i) for i in range(2)]
            began = time.monotonic()
            groups = list(swarm.rollouts(prompts, 2, SHORT, take=4, timeout_s=60))
            assert sorted(group.metadata for group in groups) == [0, 1, 2, 3]
            processes.until("seed", lambda state: not state["work"]["samples_leased"])
            for name in ("a", "b"):
                processes.until(name, lambda state: not state["nodes"][0]["work"]["generating"])
            assert time.monotonic() - began < 50

            # Partial groups, at a deadline.
            prompts = [PromptSpec([4], SHORT, n=2), PromptSpec([5], SHORT)]
            for group in swarm.rollouts(prompts, 4, SHORT, partial_after_s=20.0, timeout_s=60):
                assert len(group.rollouts) == group.n

            # An evaluation in another thread, while an asynchronous loop trains.
            scores: list[int] = []

            def evaluate() -> None:
                greedy = SamplingParams(max_tokens=6, temperature=0.0)
                for group in swarm.rollouts([[4], [5]], 1, greedy, purpose="evaluate", priority=1, timeout_s=60):
                    scores.append(len(group.rollouts[0].token_ids))

            async def train() -> list[float]:
                weights: list[float] = []
                async for group in swarm.rollouts([[4 + i] for i in range(6)], 2, SHORT, timeout_s=60):
                    for rollout in group.rollouts:
                        old = np.array(rollout.logprobs)
                        weights += importance_weights(old, old).tolist()
                return weights

            other = threading.Thread(target=evaluate)
            other.start()
            assert asyncio.run(train()) == [1.0] * (6 * 2 * 8)
            other.join(60)
            assert scores == [6, 6]
