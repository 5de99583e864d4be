"""A day of virtual time, in short form."""

import json

import pytest

from scenarios.sim import day
from swarm.protocol.core.events import VersionId


def test_a_short_day(capsys: pytest.CaptureFixture[str]) -> None:
    """Six minutes of eight nodes; one leaves or joins each minute, and the trainer is killed once."""
    words = "--nodes 8 --hours 0.1 --every-s 60 --per-minute 0.25 --restarts 1 --mib 1 --json"
    assert day.main(words.split()) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [], "no hour has passed"


def test_what_is_wrong_with_a_day_is_said() -> None:
    crowd = day.Crowd(3)
    run = day.Day(crowd, 1 << 20, 0, every_s=60.0, per_minute=0.0, restarts=0)
    run.run(0.05)
    assert day.wrong(run) == []
    run.rows = [
        {"authority_bytes": 100 + n, "node_bytes": 100, "resident_mib": 100 if n > 4 else 50} for n in range(20)
    ]
    assert day.wrong(run) == ["authority_bytes grew by 9.3% from the second quarter to the last"]
    run.equivocations, run.late = 1, 2
    run.world.members()[0].core.state.held = VersionId(0, 0)
    found = day.wrong(run)
    assert found[0] == "1 of 3 nodes lack the head at the end"
    assert found[1].startswith("1 times")
    assert found[2].startswith("2 of 3 versions")


def test_objects_are_measured_once_and_without_classes() -> None:
    shared = bytes(10_000)
    assert 10_000 < day.held_bytes([shared, shared]) < 11_000
    assert day.held_bytes([day.Day, len]) < 1_000


def test_heartbeats_with_which_nobody_could_join_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        day.main(["--beat-s", "240"])
    assert "--beat-s: at most 200" in capsys.readouterr().err
