"""Which nodes are ready, what is missing in a sentence, and waiting for it."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from seed_kit import running

from codec.errors import UsageError
from node import NodeState, Swarm, SwarmDown, SwarmTimeout
from node.status.schema import MemberStatus, QuarantineStatus, SeedReport, SeedStatus
from node.trainers.readiness import Readiness, readiness, wait_ready

HEAD = (0, 3)


def ready(name: str, tokens_s: float = 100.0) -> MemberStatus:
    return MemberStatus(name=name, standing="fresh", held=HEAD, engine=HEAD, tokens_s=tokens_s)


def found(*nodes: MemberStatus, max_lag: int = 0) -> Readiness:
    return readiness(SeedReport(swarm=SeedStatus(head=HEAD, model_bytes=4_000_000_000, nodes=list(nodes))), max_lag)


@pytest.mark.parametrize(
    ("node", "state", "why"),
    [
        (ready("a"), NodeState.READY, ""),
        (MemberStatus(standing="fresh"), NodeState.JOINING, ""),
        (MemberStatus(held=(0, 1), catching_up=0.25), NodeState.COPYING, "3.0 GB to go"),
        (MemberStatus(catching_up=0.0), NodeState.COPYING, "4.0 GB to go"),
        (MemberStatus(held=HEAD), NodeState.PROVING, ""),
        (MemberStatus(held=HEAD, engine=(0, 2)), NodeState.BEHIND, "version 2 of 3"),
        (MemberStatus(held=HEAD, engine=HEAD, standing="soft"), NodeState.SILENT, ""),
        (MemberStatus(held=HEAD, engine=HEAD, standing="dead"), NodeState.SILENT, ""),
        (
            MemberStatus(held=HEAD, engine=HEAD, quarantine=QuarantineStatus(why="it lied")),
            NodeState.REFUSED,
            "it lied",
        ),
    ],
)
def test_each_state_of_a_node(node: MemberStatus, state: NodeState, why: str) -> None:
    (one,) = found(node).nodes
    assert (one.state, one.why) == (state, why)


def test_an_engine_of_an_older_version_is_ready_if_the_lag_allows_it_and_of_an_older_epoch_never() -> None:
    behind = MemberStatus(held=HEAD, engine=(0, 2))
    assert [found(behind, max_lag=lag).count() for lag in (0, 1)] == [0, 1]
    report = SeedReport(swarm=SeedStatus(head=(1, 2), nodes=[MemberStatus(held=(1, 2), engine=(0, 2))]))
    assert readiness(report, max_lag=9).count(NodeState.BEHIND) == 1


def test_the_sentence_names_what_is_missing() -> None:
    nodes = [
        ready("a", 120.0), MemberStatus(name="b"), MemberStatus(name="c", catching_up=0.9),
        MemberStatus(name="d", catching_up=0.5), MemberStatus(name="e", held=HEAD),
        MemberStatus(name="f", held=HEAD, quarantine=QuarantineStatus(why="its results were bad")),
    ]  # fmt: skip
    assert found(*nodes).missing(8) == (
        "1 of 8 nodes are ready. Of the others 1 is joining (b); 2 are copying the model (c: 400 MB to go, "
        "d: 2.0 GB to go); 1 is loading and proving an engine, or without one (e); 1 is refused (f: its results were "
        "bad)."
    )
    assert found(ready("a"), ready("b")).missing(2, 300.0) == (
        "2 ready nodes make 200 of 300 tokens/s. No other node is connected to the seed."
    )
    assert (
        found(ready("a", 10.0))
        .missing(2, 11.0)
        .startswith("1 of 2 nodes are ready and 1 ready node makes 10 of 11 tokens/s.")
    )
    assert "swarm-node invite" in found().missing(1)
    assert found(ready("a"), MemberStatus()).missing(1, 100.0) == ""
    many = found(*(MemberStatus(name=f"n{i}") for i in range(9))).missing(1)
    assert many.endswith("9 are joining (n0, n1, n2, n3 and 5 more).")


def test_waiting_ends_when_enough_are_ready_and_tells_what_changes(tmp_path: Path) -> None:
    told: list[str] = []
    with running(tmp_path) as there:
        there.seed.members = [MemberStatus(name="a", catching_up=0.5)]
        there.seed.head = HEAD

        def tell(text: str) -> None:
            told.append(text)
            there.seed.members = [ready("a")] if len(told) == 1 else [ready("a"), ready("b", 50.0)]

        with Swarm.attach(home=tmp_path) as swarm:
            got = swarm.wait_ready(2, tokens_per_second=150.0, timeout_s=30, tell=tell)
    assert (got.count(), got.tokens_per_second) == (2, 150.0)
    assert told == [
        "0 of 2 nodes are ready and 0 ready nodes make 0 of 150 tokens/s. Of the others 1 is copying the model "
        "(a: 500 B to go).",
        "1 of 2 nodes are ready and 1 ready node makes 100 of 150 tokens/s. No other node is connected to the seed.",
    ]


def test_a_timeout_says_what_is_missing_and_a_seed_that_is_away_is_waited_for(tmp_path: Path) -> None:
    with running(tmp_path) as there:
        there.seed.members = [MemberStatus(name="slow", catching_up=0.5)]
        with pytest.raises(SwarmTimeout, match=r"not ready within 1 s: 0 of 1 nodes .* \(slow: 500 B to go\)"):
            wait_ready(tmp_path, None, None, 1.0)
    began = time.monotonic()
    with pytest.raises(SwarmDown, match="No seed serves"):
        wait_ready(tmp_path, 1, None, 0.7)
    assert time.monotonic() - began >= 0.7

    back: list[Readiness] = []
    waiting = threading.Thread(target=lambda: back.append(wait_ready(tmp_path, 1, None, 30.0)))
    waiting.start()
    with running(tmp_path) as there:
        there.seed.members = [ready("a")]
        there.seed.head = HEAD
        waiting.join(20)
    assert [one.count() for one in back] == [1]


@pytest.mark.parametrize(("nodes", "speed"), [(0, None), (None, -1.0), (None, float("nan")), (1, float("inf"))])
def test_a_number_out_of_range_is_refused(tmp_path: Path, nodes: int | None, speed: float | None) -> None:
    with pytest.raises(UsageError, match="wait_ready"):
        wait_ready(tmp_path, nodes, speed, 1.0)


def command(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "node.cli", "wait", "--home", str(home), *words]
    return subprocess.run(run, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_the_command_waits_and_answers_programs(tmp_path: Path) -> None:
    gone = command(tmp_path)
    assert (gone.returncode, "swarm-node seed" in gone.stderr) == (3, True)
    with running(tmp_path) as there:
        there.seed.members = [ready("a", 50.0), MemberStatus(name="b", held=HEAD)]
        there.seed.head = HEAD
        done = command(tmp_path, "--nodes", "1", "--json")
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (said["ready"], said["tokens_per_second"]) == (1, 50.0)
        assert [(node["name"], node["state"]) for node in said["nodes"]] == [("a", "ready"), ("b", "proving")]
        late = command(tmp_path, "--nodes", "2", "--timeout", "1s")
        assert late.returncode == 1
        assert "1 of 2 nodes are ready. Of the others 1 is loading and proving an engine" in late.stderr
