"""A trainer's state saved in a swarm of real processes: seed, disk and a node are lost, and training goes on."""

import io
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from kit import check, checkpoint, root_of, weights

from codec import Checkpoint
from node import Swarm as Trainer
from scenarios.faults.lost_seed import measure
from scenarios.harness.swarm import Swarm, swarm_on

pytestmark = pytest.mark.slow

FIRST = weights(tensors=6, elements=40_000)
NODES = 4


class Training:
    """float32 weights by name, AdamW, and steps that are the same each time they are made from the same state."""

    def __init__(self, base: Path) -> None:
        import torch

        found = Checkpoint.open(base)
        self.weights = {
            spec.name: torch.nn.Parameter(torch.from_numpy(found.bits(spec.name).copy()).view(torch.bfloat16).float())
            for spec in found.layout.tensors
        }
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-2)
        self.steps = 0

    def step(self) -> None:
        import torch

        chance = torch.Generator().manual_seed(self.steps)
        for weight in self.weights.values():
            weight.grad = torch.randn(weight.shape, generator=chance)
        self.optimizer.step()
        self.steps += 1

    def state(self) -> bytes:
        import torch

        buffer = io.BytesIO()
        held = {name: weight.detach() for name, weight in self.weights.items()}
        torch.save({"weights": held, "optimizer": self.optimizer.state_dict(), "steps": self.steps}, buffer)
        return buffer.getvalue()

    def load(self, state: Path) -> None:
        import torch

        found = torch.load(state, weights_only=True)
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(found["weights"][name])
        self.optimizer.load_state_dict(found["optimizer"])
        self.steps = found["steps"]

    def all_tensors(self) -> list[Any]:
        moments = [each for state in self.optimizer.state_dict()["state"].values() for each in state.values()]
        return [*(weight.detach() for weight in self.weights.values()), *moments]


def assert_equal(one: Training, other: Training) -> None:
    import torch

    assert one.steps == other.steps
    for first, second in zip(one.all_tensors(), other.all_tensors(), strict=True):
        assert torch.equal(first, second)


def lose(swarm: Swarm, *nodes: str) -> None:
    """Kill the seed and delete its home; kill these nodes."""
    swarm.kill("seed")
    shutil.rmtree(swarm.home("seed"))
    for name in nodes:
        swarm.kill(name)


@pytest.mark.skipif(find_spec("torch") is None, reason="it trains with torch")
def test_training_goes_on_bit_for_bit_after_seed_trainer_and_a_node_are_lost(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", FIRST)
    with swarm_on(tmp_path / "swarm", base, nodes=NODES) as swarm:
        training = Training(base)
        with Trainer.attach(home=swarm.home("seed"), start=False) as trainer:
            for number in range(3):
                training.step()
                published = trainer.publish(dict(training.weights), step=number)
            root = published.wait(1.0).root
            trainer.save_state(b"an older state", step=1).wait()
            saving = trainer.save_state(training.state(), step=3)
            assert saving.wait().fragments == (2, NODES)
            assert saving.saved
            (state,) = swarm.json("seed", "status")["saved_states"]
            assert (state["step"], state["whole"], state["held"], state["nodes"]) == (3, True, NODES, NODES)
            assert not list(swarm.home("seed").glob("state/.coming*"))
        shutil.copy(swarm.home("seed") / "authority.key", tmp_path / "kept.key")
        lose(swarm, "node0")

        words = ["--state", str(tmp_path / "state"), "--key", str(tmp_path / "kept.key")]
        for address in saving.nodes:
            words += ["--node", address]
        back = swarm.json("new", "rescue", str(tmp_path / "rescued"), *words)
        assert back["root"] == root.hex()
        assert (back["state"]["step"], back["state"]["serial"]) == (3, saving.serial)
        assert not swarm.home("new").exists(), "a new machine needs no home"

    again = Training(tmp_path / "rescued")
    again.load(tmp_path / "state")
    assert_equal(again, training)
    rescued = Checkpoint.open(tmp_path / "rescued")
    for name, weight in training.weights.items():
        import torch

        assert (weight.detach().to(torch.bfloat16).view(torch.uint16).numpy() == rescued.bits(name)).all()
    training.step()
    again.step()
    assert_equal(again, training)


def test_what_the_commands_refuse(tmp_path: Path) -> None:
    base = checkpoint(tmp_path / "base", FIRST)
    state = tmp_path / "state"
    state.write_bytes(b"state" * 100_000)
    with swarm_on(tmp_path / "swarm", base) as swarm:
        check(swarm.command("seed", "save-state", str(state)), 2, "No node is there")
        ticket = swarm.ticket()
        swarm.node("without", ticket, "--model", str(base), "--state-gb", "0")
        swarm.until_seed("it joined", lambda seed: len(seed.nodes) == 1)
        check(swarm.command("seed", "save-state", str(state)), 2, "No node is there")
        swarm.node("with", ticket, "--model", str(base))
        swarm.until_seed("it joined", lambda seed: len(seed.nodes) == 2)
        check(swarm.command("seed", "save-state", str(tmp_path / "none")), 2, "Cannot read")
        saved = swarm.json("seed", "save-state", str(state), "--step", "9")
        assert (saved["fragments"], saved["needed"], saved["bytes"]) == (1, 1, 500_000)
        (node,) = saved["nodes"]
        key = swarm.home("seed") / "authority.key"
        other = tmp_path / "other.key"
        swarm.json("any", "keygen", "--out", str(other))
        out = str(tmp_path / "out")
        for words, why in (
            (("--state", out), "address of a node"),
            (("--state", out, "--node", node), "swarm's key"),
            (("--node", node, "--key", str(key)), "folder to make"),
            ((), "folder to make"),
            ((out, "--node", node, "--key", str(key), "--version", "1"), "does not go with"),
            ((out, "--node", "127.0.0.1:0", "--key", str(key)), "not 0"),
        ):
            check(swarm.command("new", "rescue", *words), 2, why)
        check(swarm.command("new", "rescue", "--state", out, "--node", node, "--key", str(other)), 3, "signature")
        gone = swarm.command("new", "rescue", "--state", out, "--node", "127.0.0.1:9", "--key", str(key))
        check(gone, 3, "nothing answers")
        assert not Path(out).exists()
        swarm.json("new", "rescue", "--state", out, "--node", node, "--key", str(key))
        assert Path(out).read_bytes() == state.read_bytes()
        back = swarm.json("new", "rescue", str(tmp_path / "rescued"), "--node", node, "--key", str(key))
        assert back["root"] == root_of(FIRST)


def test_the_measurement_runs_small(tmp_path: Path) -> None:
    found = measure(tmp_path, 8_000_000, 30_000_000, nodes=4, lose=2)
    assert found["bit_equal"]
    assert (found["fragments"], found["needed"]) == (4, 2)
