"""The long runs in short form: kills, a partition, a soak."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scenarios.faults import kills, partition
from scenarios.faults.kills import Instant


@pytest.mark.slow
def test_kills(capsys: pytest.CaptureFixture[str]) -> None:
    """Five kills."""
    assert kills.main(["--instants", "5", "--seed", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failed"] == ""
    assert len(found["instants"]) == 5
    (_, *_, whole) = found["rows"]
    assert (whole["kind"], whole["kills"]) == ("all", 5)
    assert sum(whole[phase] for phase in kills.PHASES) == 5
    assert whole["most_s"] >= whole["p95_s"] >= whole["median_s"] > 0
    assert found["samples"] == 2 * found["groups"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_soak(tmp_path: Path) -> None:
    """In a process of its own, since it takes a mount namespace for the small disks; a node goes each ten versions."""
    words = ["--versions", "60", "--a-minute", "3", "--every-s", "0.2", "--json", "--folder", str(tmp_path / "soak")]
    command = [sys.executable, "-m", "scenarios.faults.soak", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    found = json.loads(ended.stdout)
    others = [sentence for sentence in found["failed"] if "grew by" not in sentence]
    assert not others, "what a minute shows of growth is not judged, all else is"
    grown = {(row["of"], row["what"]): row["last"] - row["first"] for row in found["rows"] if not row["flat"]}
    # Two samples of files that are open at the moment differ by some; one that stays open for each version makes 30.
    assert not {each for each, more in grown.items() if each[1] in ("descriptors", "connections") and more > 12}
    assert found["churned"] >= 5
    assert found["full"] == 2
    assert {row["of"] for row in found["rows"]} == {"seed", "trainer", "steady", "rest", "steady's engine"}


@pytest.mark.wan
@pytest.mark.alone
@pytest.mark.long
def test_a_partition(capsys: pytest.CaptureFixture[str]) -> None:
    assert partition.main(["--minutes", "0.4", "--preset", "loopback", "--every-s", "4", "--most", "0", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["versions"] >= 4
    assert 0 < row["healed_s"] < 60
    assert row["ratio"] == pytest.approx(row["healed_s"] / row["fresh_s"])


def test_kills_are_counted_by_actor_and_phase(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        Instant(1, "seed", "seed", "encoding", 1, 0.1, 4.0),
        Instant(2, "a", "node", "spreading", 2, 0.3),
        Instant(3, "a", "node", "starting", 2, 0.5, 8.0),
    ]
    seed, node, whole = kills.rows_of(found)
    assert (seed["kills"], seed["encoding"], seed["median_s"]) == (1, 1, 4.0)
    assert (node["kills"], node["spreading"], node["starting"], node["most_s"]) == (2, 1, 1, 8.0)
    assert (whole["kind"], whole["kills"], whole["median_s"], whole["p95_s"]) == ("all", 3, 6.0, 8.0)
    kills.print_rows(kills.rows_of(found))
    assert "8.0 s" in capsys.readouterr().out
