"""A trainer that returns to an older version: real seeds and nodes follow, also those that were away or restarted."""

import signal
from pathlib import Path

import numpy as np
import pytest
from kit import Words, all_hold, checkpoint, holds, layout_of, root_of, step, weights

from codec.errors import UsageError
from node.host.port import free_port
from node.trainers.api import Swarm as Trainer
from scenarios.harness.swarm import swarm_in

pytestmark = pytest.mark.slow


def pairs(words: Words) -> list[tuple[str, np.ndarray]]:
    return [(spec.name, tensor) for spec, tensor in zip(layout_of(words).tensors, words, strict=True)]


def test_every_node_goes_back_and_on(tmp_path: Path):
    versions = [weights()]
    for seed in range(1, 6):
        versions.append(step(versions[-1], seed))
    base = checkpoint(tmp_path / "base", versions[0])
    with swarm_in(tmp_path) as swarm:
        there = ("--listen", f"127.0.0.1:{free_port()}")
        swarm.seed(base, *there)
        ticket = swarm.ticket("--nodes", "4")
        for name in ("a", "b", "c"):
            swarm.node(name, ticket, "--model", str(base))
        swarm.until("seed", all_hold((0, 0), 3))
        with Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
            for number in range(1, 5):
                trainer.publish(pairs(versions[number]), step=number).wait(quorum=1.0, timeout_s=30)
            swarm.signal("c", signal.SIGKILL)  # it misses the next versions
            root_2 = bytes.fromhex(root_of(versions[2]))

            assert trainer.resume(root_2) == (1, 2), "from what the seed keeps"
            for name in ("a", "b"):
                assert swarm.until(name, holds(root_2.hex()))["nodes"][0]["held"] == [1, 2]
            assert trainer.publish(pairs(versions[5]), step=5).wait(timeout_s=30).version == 3
            for name in ("a", "b"):
                swarm.until(name, holds(root_of(versions[5])))
            swarm.node("c", ticket, "--model", str(base))
            assert swarm.until("c", holds(root_of(versions[5])))["nodes"][0]["held"] == [1, 3]

            assert trainer.resume(bytes.fromhex(root_of(versions[5]))) == (1, 3), "the head needs no rollback"
            with pytest.raises(UsageError, match="has no version 4; its newest is 3"):
                trainer.rollback(4)
            with pytest.raises(UsageError, match="has no version with the root 0000"):
                trainer.resume(bytes(32))
            with pytest.raises(UsageError, match=r"not those of version 0\.1"):
                trainer.rollback(1, pairs(versions[2]))
            assert trainer.head == (1, 3)
            assert trainer.rollback(1, pairs(versions[1])) == (2, 1), "with the trainer's own weights"
            for name in ("a", "b", "c"):
                swarm.until(name, holds(root_of(versions[1])))

        swarm.signal("seed", signal.SIGKILL)
        swarm.forget("seed")
        swarm.seed(base, *there)
        assert swarm.state("seed")["head"] == [2, 1], "a restarted seed knows which version is the head"
        with Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
            assert trainer.publish(pairs(versions[2]), step=6).wait(timeout_s=30).version == 2
            for name in ("a", "b", "c"):
                assert swarm.until(name, holds(root_2.hex()))["nodes"][0]["held"] == [2, 2]
            assert trainer.rollback(0) == (3, 0), "to the base, which the seed can always read"
            for name in ("a", "b", "c"):
                swarm.until(name, holds(root_of(versions[0])))


def test_a_version_that_is_no_longer_kept_needs_the_trainers_weights(tmp_path: Path):
    versions = [weights(4, 2000)]
    for seed in range(1, 22):
        versions.append(step(versions[-1], seed))
    base = checkpoint(tmp_path / "base", versions[0])
    with swarm_in(tmp_path) as swarm:
        swarm.seed(base)
        with Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
            for number in range(1, 22):
                trainer.publish(pairs(versions[number]), step=number).wait(timeout_s=30)
            with pytest.raises(UsageError, match=r"no longer keeps what leads to version 0\.3"):
                trainer.rollback(3)
            assert trainer.rollback(13) == (1, 13), "at least eight versions are kept"
            assert trainer.rollback(3, pairs(versions[3])) == (2, 3)
            assert trainer.state["sealed"]["root"] == root_of(versions[3])
