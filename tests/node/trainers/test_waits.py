"""Each wait of a trainer logs what it waits for and ends with the true cause: real processes that die, stop or lag."""

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kit
import pytest

from codec.errors import SwarmError
from node import SamplingParams, Swarm
from node.status.schema import LedgerStatus, MemberStatus, QuarantineStatus, SeedReport, SeedStatus
from node.trainers.connection import patience, seedwatch
from node.trainers.connection.patience import Wait
from node.trainers.errors import SwarmDown, SwarmTimeout
from node.trainers.publish.publication import Holders
from node.trainers.ranks.peers import RankPeers, named
from node.trainers.standing import _why_no_group
from scenarios.harness.processes import PATIENCE_S
from scenarios.harness.swarm import swarm_in

WORDS = kit.weights(4)
SOON_S = 0.3
FAR_S = 300.0
"""A deadline that is never reached: a call that ends has ended for another cause."""


def tensors(step: int) -> dict[str, Any]:
    return {f"layer.{i:03}.weight": bits for i, bits in enumerate(kit.step(WORDS, step))}


def error_of(call: Callable[[], Any]) -> SwarmError:
    with pytest.raises(SwarmError) as raised:
        call()
    return raised.value


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ------------------------------------------------------------ the parts


def test_a_wait_logs_at_growing_intervals(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    now = 100.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now)
    wait = Wait(600.0, lambda: "step 3 waits for rank 1 of 2")
    lines = []
    while not wait.over:
        wait.log_if_due()
        if caplog.records:
            lines.append((round(now - 100), caplog.records[0].getMessage()))
            caplog.clear()
        now += 1.0
    assert [at for at, _ in lines] == [5, 10, 20, 40, 80, 140, 200, 260, 320, 380, 440, 500, 560]
    assert lines[1][1] == "step 3 waits for rank 1 of 2; waiting for 10 s now, for 600 s at most."
    assert wait.slice_s() == 0.0


def test_ranks_are_named():
    assert [named(ranks, 8) for ranks in ([3], [3, 4], [1, 2, 7])] == [
        "rank 3 of 8", "ranks 3 and 4 of 8", "ranks 1, 2 and 7 of 8",
    ]  # fmt: skip


def test_an_ended_process_is_seen_before_its_parent_has_asked():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        peers = RankPeers([os.getpid(), other.pid])
        assert peers.ended() == []
        other.kill()
        until(lambda: peers.ended() == [1])  # it is a zombie: its exit status was not read
        peers.close()
        peers.close()
        assert peers.ended() == []


def test_nodes_that_lack_a_version_are_named():
    lacking = tuple(f"box-{i} at version {i}" for i in range(1, 6))
    text = "3 of 8 nodes (38%) hold it, not box-1 at version 1, box-2 at version 2, box-3 at version 3 and 2 others"
    assert str(Holders(8, lacking)) == text
    assert str(Holders(0, ())).startswith("no node is connected")
    assert (Holders(0, ()).share, Holders(4, ()).share) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "No node is connected to the seed: swarm-node invite"),
        ([MemberStatus(), MemberStatus()], "None of the 2 nodes has an engine"),
        (
            [MemberStatus(engine=(0, 1), name="box", quarantine=QuarantineStatus(why="lied"))],
            r"in quarantine \(box: lied\)",
        ),
        (
            [MemberStatus(engine=(0, 1), tokens_s=12.4)],
            "1 nodes generate samples, at 12 tokens/s.* 3 too_old",
        ),
    ],
)
def test_why_no_rollouts_come(nodes: list[MemberStatus], says: str):
    found = _why_no_group(SeedReport(swarm=SeedStatus(nodes=nodes), work=LedgerStatus(refused={"too_old": 3})), "s")
    assert re.search(says, found), found


# ------------------------------------------------------------ one trainer and its seed


@pytest.mark.slow
def test_the_end_of_a_seed_is_logged_at_once_then_waited_for_then_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    with swarm_in(tmp_path) as swarm:
        base = kit.checkpoint(tmp_path / "base", WORDS)
        swarm.seed(base)
        trainer = Swarm.attach(home=swarm.home("seed"), start=False)
        trainer.publish(tensors(1), step=1).wait(timeout_s=FAR_S)

        swarm.signal("seed", signal.SIGKILL)
        until(lambda: "has ended. What is published waits" in caplog.text)  # although nothing was published meanwhile
        done: list[Any] = []
        waiting = threading.Thread(target=lambda: done.append(trainer.publish(tensors(2), step=2)))
        waiting.start()
        until(
            lambda: (
                re.search(r"publish of step 2 waits for the seed of .* to be started again", caplog.text) is not None
            )
        )
        assert "waiting for" not in caplog.text, "logged at once, not after `SAY_AFTER_S`"
        swarm.seed(base)
        waiting.join(FAR_S)
        assert done[0].wait(timeout_s=FAR_S).version == 2
        assert "is back, after" in caplog.text

        swarm.signal("seed", signal.SIGKILL)
        monkeypatch.setattr(seedwatch, "RECONNECT_S", SOON_S)
        for step in (3, 4, 5, 6):
            began = time.monotonic()
            error = error_of(lambda step=step: trainer.publish(tensors(step), step=step))
            assert isinstance(error, SwarmDown)
            assert f"Step {step} was not published. The seed of {swarm.home('seed')} has ended" in str(error)
            assert "swarm-node seed --base FOLDER" in str(error)
            assert time.monotonic() - began < FAR_S
        with caplog.at_level(logging.WARNING):
            trainer.close()  # no publish was accepted, so none is lost


@pytest.mark.slow
def test_close_raises_the_error_of_a_publish_that_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with swarm_in(tmp_path) as swarm:
        swarm.seed(kit.checkpoint(tmp_path / "base", WORDS))
        trainer = Swarm.attach(home=swarm.home("seed"), start=False)
        trainer.publish(tensors(1), step=1).wait(timeout_s=FAR_S)
        group = os.getpgid(swarm.running["seed"].pid)
        os.killpg(group, signal.SIGSTOP)
        late = trainer.publish(tensors(2), step=2)
        text = str(error_of(lambda: late.wait(timeout_s=SOON_S)))
        assert "Step 2 was not sealed within 0 s" in text
        assert f"the seed (process {swarm.running['seed'].pid}, which is stopped (kill -CONT" in text
        monkeypatch.setattr(seedwatch, "RECONNECT_S", SOON_S)
        os.killpg(group, signal.SIGKILL)  # a stopped child does not see that the seed has ended
        error = error_of(lambda: trainer.close(timeout_s=FAR_S))
        assert isinstance(error, SwarmDown)
        assert late.error is error


def test_a_seed_that_the_trainer_started_is_not_waited_for(tmp_path: Path):
    base = kit.checkpoint(tmp_path / "base", WORDS)
    trainer = Swarm.attach(home=tmp_path / "home", base=base)
    assert trainer._seed is not None
    process = trainer._seed._process
    try:
        trainer.publish(tensors(1), step=1).wait(timeout_s=FAR_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert "The seed that this trainer started has ended" in str(
            error_of(lambda: trainer.publish(tensors(2), step=2, timeout_s=FAR_S))
        )
    finally:
        trainer.close()


@pytest.mark.slow
def test_rollouts_say_why_none_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(patience, "SAY_AFTER_S", 0.05)
    with swarm_in(tmp_path) as swarm:
        swarm.seed(kit.checkpoint(tmp_path / "base", WORDS))
        ticket = swarm.ticket()
        with Swarm.attach(home=swarm.home("seed"), start=False) as trainer:

            def first() -> Any:
                return next(iter(trainer.rollouts([[1]], 1, SamplingParams(max_tokens=4), timeout_s=1.0)))

            error = error_of(first)
            assert isinstance(error, SwarmTimeout)
            assert "1 are open. No node is connected to the seed" in str(error)
            assert "rollouts: no group yet. No node is connected to the seed" in caplog.text
            sealed = trainer.publish(tensors(1), step=1).wait(timeout_s=FAR_S)
            assert "no node is connected" in str(error_of(lambda: sealed.wait(quorum=0.5, timeout_s=SOON_S)))
            swarm.node("box", ticket)
            swarm.until("seed", kit.all_hold([0, 1], 1))
            assert "None of the 1 nodes has an engine" in str(error_of(first))
