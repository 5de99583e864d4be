"""Real processes show how many experts of a mixture a version changed, and send nothing of the others."""

from pathlib import Path

import pytest

from scenarios.bench.experts import Mixture
from scenarios.harness.swarm import swarm_on


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True])
def test_the_seed_and_delta_tell_which_experts_a_version_changed(tmp_path: Path, stacked: bool) -> None:
    """Experts one by one, and all of a layer in one tensor, of which a block holds several."""
    mixture = Mixture(24, stacked=stacked)
    base = mixture.write(tmp_path / "base")
    with swarm_on(tmp_path / "swarm", base, nodes=1) as swarm:
        for number, chosen in enumerate(((3,), (0, 7, 23), range(24), ()), 1):
            mixture.step(chosen, 0.01, number)
            swarm.publish(mixture.write(tmp_path / f"v{number}"), "--wait")
            swarm.until_seed("the node holds it", lambda seed, n=number: [m.held for m in seed.nodes] == [(0, n)])
        plain = swarm.json("seed", "status")["steps"]
        assert [(step["experts"], step["experts_touched"]) for step in plain] == [(48, 2), (48, 6), (48, 48), (48, 0)]
        assert "experts changed, of 48: v1 2   v2 6   v3 48   v4 0\n" in swarm.command("seed", "status").out
        one, three, every, none = (step["delta_bytes"] for step in plain)
        assert none < 300
        for nbytes, experts in ((three, 3), (every, 24)):
            assert 0.7 * experts < (nbytes - none) / (one - none) < 1.1 * experts
        found = swarm.json("here", "delta", str(base), str(tmp_path / "v1"))["experts"]
        assert (found["count"], found["touched"], found["untouched"]) == (48, 2, 46)
        layer = found["layers"]["model.layers.1.mlp"]
        assert [expert for expert, changed in enumerate(layer["changed"]) if changed] == [3]
        assert found["max"] == pytest.approx(0.01, rel=0.01)


@pytest.mark.slow
def test_a_model_without_experts_shows_none(tmp_path: Path) -> None:
    from kit import checkpoint, step, weights

    words = weights(2)
    with swarm_on(tmp_path / "swarm", checkpoint(tmp_path / "base", words)) as swarm:
        swarm.publish(checkpoint(tmp_path / "v1", step(words, 1)))
        (shown,) = swarm.json("seed", "status")["steps"]
        assert (shown["experts"], shown["experts_touched"]) == (None, None)
        assert "experts" not in swarm.command("seed", "status").out
