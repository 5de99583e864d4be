"""The RL scenarios in short form: each must reach its own targets."""

from pathlib import Path

import pytest

from scenarios.rl import faults, hetero, pressure
from scenarios.rl.ledger_sim import virtually

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_the_speed_of_unequal_nodes_is_used():
    row = hetero.virtual_row(4.0, nodes=2, steps=2)
    assert hetero.met(row), row
    assert row["gain"] > 0.5, row


@pytest.mark.parametrize("gathers", pressure.GATHERS)
@pytest.mark.parametrize("held", [*(pytest.param(held, marks=pytest.mark.long) for held in (0.25, 1.0)), 4.0])
def test_nodes_generate_no_more_than_a_slower_trainer_uses(held: float, gathers: str):
    """The limit must not slow the trainer: a step takes little more than its own computing."""
    paced, free = (virtually(pressure.run, 0.5, held, gathers, 8, 1, pace, 2) for pace in (True, False))
    assert pressure.met(paced), paced
    assert paced["worst_lag"] <= 1
    assert paced["step_ratio"] <= max(1.1, free["step_ratio"] + 0.02), (paced, free)
    if held > 1:
        assert free["drawn_by_used"] > 2, "without the limit nodes must waste tokens, or the test proves nothing"
        assert paced["unused_by_used"] < 0.05, "the status must agree"
        assert free["useful"] < 0.5 * free["generating"], "unused tokens are not useful"


@pytest.mark.long
def test_a_real_node_generates_no_more_than_a_slower_trainer_uses():
    pytest.importorskip("torch")
    row = pressure.real(0.5, 10, pressure.WARM_UP, 1)
    print(f"{row['drawn_by_used']:.3f} tokens generated for each used")
    assert pressure.met(row), row
    assert row["worst_lag"] <= 1, row


@pytest.mark.long
def test_faults_cost_no_more_than_the_failed_nodes_had():
    calm, rough = faults.simulate([0.2], steps=3, nodes=8, groups=64, check=0.2, seeds=[1])
    assert (calm["struck"], calm["lost_to_faults"], calm["at_stake"]) == (0, 0, 0)
    assert calm["lost"] <= 0.01 * calm["drawn"], calm
    assert rough["struck"] == 5
    assert rough["quarantined"] == 1, "the lying node"
    assert rough["lost_to_faults"] <= rough["at_stake"], rough
    assert rough["step_ratio"] <= faults.REACH_STEP, rough


def test_training_through_the_swarm_has_the_bits_of_training_in_one_process(tmp_path: Path):
    """One node is killed during the run, and the other generates its groups again."""
    pytest.importorskip("torch")
    from node.trainers.grpo.task import SortLetters
    from node.trainers.grpo.tiny import TinyRecipe, make_tiny
    from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer
    from scenarios.rl import fidelity

    class EarlyLetters(SortLetters):
        """Rewards early letters, which an untrained policy sometimes picks, so that every step has a gradient."""

        def score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
            return sum(letter < 13 for letter in answer) / len(answer)

    recipe = TinyRecipe(letters=3, hidden=64, inner=64, layers=1, heads=2, kv_heads=1, steps=2, rows=4)
    make_tiny(base := tmp_path / "base", recipe, lambda line: None)
    config = GrpoConfig(prompts=4, samples=4, lr=1e-3, lr_warmup_steps=1)
    trainers = [GrpoTrainer(base, EarlyLetters(3), config, device="cpu") for _ in range(2)]
    result = fidelity.compare(base, trainers, 3, nodes=2, kill=2)
    assert fidelity.identical(result), result
    assert result["different_roots"] == 3, "every step changed bits"
    assert result["rollouts"] == 3 * 4 * 4


@pytest.mark.long
def test_training_with_replayed_routes_through_the_swarm_has_the_bits_of_training_in_one_process(tmp_path: Path):
    """The routes of a mixture of experts pass the coder, the leases and the ledger; a node is killed meanwhile."""
    pytest.importorskip("torch")
    from node.trainers.grpo.task import SortLetters
    from node.trainers.grpo.trainer import GrpoConfig, GrpoTrainer
    from scenarios.rl import fidelity
    from scenarios.rl.letter_experts import make_letter_experts

    class EarlyLetters(SortLetters):
        """As above."""

        def score(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
            return sum(letter < 13 for letter in answer) / len(answer)

    base = make_letter_experts(tmp_path / "base")
    config = GrpoConfig(prompts=4, samples=4, lr=1e-3, lr_warmup_steps=1, routes=True)
    trainers = [GrpoTrainer(base, EarlyLetters(3), config, device="cpu") for _ in range(2)]
    result = fidelity.compare(base, trainers, 3, nodes=2, kill=2)
    assert fidelity.identical(result), result
    assert result["different_roots"] == 3, "every step changed bits"
    assert result["rollouts"] == 3 * 4 * 4
