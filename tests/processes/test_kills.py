"""Processes that are killed or interrupted at any moment: after a restart they reach the head's root."""

import random
import re
import signal
import time
from pathlib import Path

import pytest
from kit import all_hold, checkpoint, holds, root_of, step, weights

from node.host.port import free_port
from scenarios.harness.processes import PATIENCE_S, group_alive
from scenarios.harness.swarm import NODE, Swarm, swarm_in

pytestmark = pytest.mark.slow

FIRST = weights(tensors=60, elements=40_000)
STEPS = [FIRST]
for number in range(1, 5):
    STEPS.append(step(STEPS[-1], number, density=0.05))


@pytest.fixture
def swarm(tmp_path: Path):
    """A seed at version 0, at a port that it keeps."""
    base = checkpoint(tmp_path / "base", FIRST)
    for number, words in enumerate(STEPS[1:], 1):
        checkpoint(tmp_path / f"step_{number}", words)
    with swarm_in(tmp_path) as swarm:
        swarm.at = ("--listen", f"127.0.0.1:{free_port()}")
        swarm.seed(base, *swarm.at)
        yield swarm
        for path in tmp_path.glob("*.log"):
            text = path.read_text(errors="replace")
            assert "Traceback" not in text, path
            assert "This is a bug" not in text, path


def test_a_node_killed_at_any_moment_ends_at_the_head(swarm: Swarm) -> None:
    """During its first catch-up, while it applies or replays versions, and while versions are published."""
    rng, ticket = random.Random(5), swarm.ticket()
    swarm.node("steady", ticket)
    swarm.until("steady", holds(root_of(FIRST)))
    published = 0
    for life in range(7):
        swarm.node("box", ticket)
        swarm.until_logged("box", '"joined"')
        if life % 2 and published < 4:
            published += 1
            swarm.publish(swarm.folder / f"step_{published}")
        time.sleep(rng.uniform(0.0, 0.4))
        swarm.signal("box", signal.SIGKILL)
        (swarm.folder / "box.log").unlink()
    while published < 4:
        published += 1
        swarm.publish(swarm.folder / f"step_{published}")
    swarm.node("box", ticket)
    for name in ("box", "steady"):
        swarm.until(name, holds(root_of(STEPS[4])))


def test_a_seed_killed_while_it_publishes_loses_no_version(swarm: Swarm) -> None:
    """Its next start opens a new attempt (or has sealed the old one); nodes reconnect by themselves."""
    rng, base = random.Random(6), swarm.folder / "base"
    ticket = swarm.ticket()
    swarm.node("box", ticket)
    swarm.node("bare", ticket)
    swarm.until("seed", all_hold([0, 0], 2))
    for number in (1, 2, 3):
        words = ("publish", str(swarm.folder / f"step_{number}"), "--json")
        trainer = swarm.piped("seed", *words)
        deadline = time.monotonic() + PATIENCE_S
        while not any(swarm.home("seed").glob(f"swarm-*/chunks/0.{number}.*")) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.03))
        swarm.signal("seed", signal.SIGKILL)
        time.sleep(0.2)
        swarm.seed(base, *swarm.at)
        # The trainer that was publishing finds the seed again and finishes: one version, not two.
        _, err = trainer.communicate(timeout=PATIENCE_S)
        assert trainer.returncode == 0, err.decode()
        state = swarm.until("seed", all_hold([0, number], 2))
        assert state["root"] == root_of(STEPS[number])
    for name in ("box", "bare"):
        swarm.until(name, holds(root_of(STEPS[3])))
        assert "equivocation" not in swarm.log(name, 1 << 20)


def test_signals_at_random_moments_end_every_command(swarm: Swarm) -> None:
    """During start, catch-up, receiving and publishing: exit code 130 or 143, no traceback, no process left."""
    rng, ticket = random.Random(7), swarm.ticket("--nodes", "50")
    commands = {
        "join": ("join", ticket, *NODE),
        "relay": ("relay", ticket, "--listen", "127.0.0.1:0"),
        "seed": ("seed", "--base", str(swarm.folder / "base"), "--listen", "127.0.0.1:0"),
        "publish": ("publish", str(swarm.folder / "step_1")),
        "status": ("status", "--watch"),
    }
    for turn in range(12):
        what = list(commands)[turn % len(commands)]
        home = "seed" if what in ("publish", "status") else f"{what}-{turn}"
        number = rng.choice([signal.SIGINT, signal.SIGTERM])
        process = swarm.piped(home, *commands[what])
        time.sleep(rng.uniform(0.0, 3.0))
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert not group_alive(process.pid), what
        if b"KeyboardInterrupt" in err and b"/node/" not in err:
            continue  # Ctrl-C while Python itself starts, before it runs any module of ours
        # In its first moments Python has no say yet: the signal itself ends the process.
        assert process.returncode in (128 + number, -number, 0 if what == "publish" else 128 + number), (what, err)
        assert b"Traceback" not in err or process.returncode < 0, (what, err.decode())
        assert not re.search(rb"bug|Error", err) or process.returncode < 0, (what, err.decode())
    assert swarm.state("seed")["role"] == "seed"
    swarm.publish(swarm.folder / "step_2")
    assert swarm.state("seed")["root"] == root_of(STEPS[2])
