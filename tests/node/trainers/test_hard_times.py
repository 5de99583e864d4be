"""A seed process that is frozen, dead or unreachable: every call of a trainer ends in time, with a typed error."""

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import pytest

from codec.errors import SwarmError, UsageError
from node import SamplingParams, Swarm
from node.trainers import api
from node.trainers.connection import seedwatch
from node.trainers.errors import SwarmBusy, SwarmDown, SwarmTimeout
from node.trainers.publish import publication
from scenarios.harness.swarm import swarm_in

SOON_S = 0.3
BOUND_S = 20.0
"""Far above the timeouts that the calls get, and far below the defaults."""
SAMPLING = SamplingParams(max_tokens=4)
WORDS = kit.weights(4)


def tensors(step: int) -> dict[str, Any]:
    return {f"layer.{i:03}.weight": bits for i, bits in enumerate(kit.step(WORDS, step))}


def raises(kind: type[SwarmError], call: Callable[[], Any], says: str) -> None:
    began = time.monotonic()
    with pytest.raises(kind, match=says):
        call()
    assert time.monotonic() - began < BOUND_S


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "STATE_WITHIN_S", SOON_S)
    monkeypatch.setattr(publication, "SEED_AWAY_S", SOON_S)
    monkeypatch.setattr(seedwatch, "RECONNECT_S", SOON_S)


@pytest.mark.slow
@pytest.mark.usefixtures("short_waits")
def test_no_call_hangs_on_a_frozen_or_dead_seed(tmp_path: Path) -> None:
    with swarm_in(tmp_path) as swarm:
        swarm.seed(kit.checkpoint(tmp_path / "base", WORDS))
        trainer = Swarm.attach(home=swarm.home("seed"), start=False)
        steps = itertools.count(1)

        def publish(**how: Any) -> Any:
            return trainer.publish(tensors(step := next(steps)), step=step, timeout_s=SOON_S, **how)

        sealed = publish().wait(timeout_s=BOUND_S)
        group = os.getpgid(swarm.running["seed"].pid)
        os.killpg(group, signal.SIGSTOP)
        try:
            raises(SwarmTimeout, lambda: sealed.wait(quorum=1.0, timeout_s=SOON_S), "was asked for its state")
            late = publish()
            raises(SwarmTimeout, lambda: late.wait(timeout_s=SOON_S), "was not sealed")
            waiting = publish()
            raises(SwarmBusy, publish, r"Two versions are not sealed .* the seed \(process \d+, which is stopped")
            newest = publish(on_busy="coalesce")
            assert waiting.superseded
            assert "did not answer" in trainer.state["error"]
            assert len(trainer.state["unsealed"]) == 2
            raises(
                SwarmTimeout, lambda: next(iter(trainer.rollouts([[1]], 1, SAMPLING, timeout_s=SOON_S))), "is stopped"
            )
            raises(SwarmTimeout, lambda: trainer.rollback(0, timeout_s=SOON_S), "was not back")
        finally:
            os.killpg(group, signal.SIGCONT)
        late.wait(timeout_s=BOUND_S)
        newest.wait(timeout_s=BOUND_S)
        assert "error" not in trainer.state
        raises(SwarmTimeout, lambda: newest.wait(quorum=1.0, timeout_s=SOON_S), "no node is connected")

        swarm.signal("seed", signal.SIGKILL)
        raises(SwarmDown, lambda: newest.wait(quorum=1.0, timeout_s=BOUND_S), "No seed serves|The seed ended")
        for _ in range(3):  # more often than there are copies, and each time it raises
            raises(SwarmDown, publish, r"Step \d+ was not published\. The seed of .* has ended, \d s ago")
        raises(
            SwarmDown,
            lambda: next(iter(trainer.rollouts([[1]], 1, SAMPLING, timeout_s=SOON_S))),
            "No seed serves|The seed ended",
        )
        assert "No seed serves" in trainer.state["error"]
        trainer.close(timeout_s=SOON_S)


def test_an_unusable_home_is_an_error_in_a_sentence(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    raises(UsageError, lambda: Swarm.attach(home=file, base=tmp_path), "cannot be a seed's home")
    raises(UsageError, lambda: Swarm.attach(home="/proc/nowhere", base=tmp_path), "cannot be a seed's home")
    raises(UsageError, lambda: Swarm.attach(home=tmp_path / "none"), "swarm-node seed --base")
    raises(UsageError, lambda: Swarm.attach(home=tmp_path / ("x" * 120), base=tmp_path), "shorter")
