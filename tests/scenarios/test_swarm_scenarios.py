"""The swarm scenarios on the simulator, small: each runs, and says what it promises to say."""

import json
import os
from collections.abc import Callable

import pytest

from scenarios import agreement, churn, egress, flash_crowd, partition, regions, trace, trainer_restart
from scenarios.real import Node, Outcome

SMALL = ["--mib", "4", "--json"]


def rows(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict]:
    assert main([*arguments, *SMALL]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


def test_egress(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(egress.main, capsys, "--simulate", "8")
    assert row["missing"] == 0
    assert row["ratio"] > 1
    assert row["copies"] < 1.2
    assert row["duplicates"] <= 0.02
    assert row["star_s"] > row["store_s"]


def test_a_twin_shares_the_processors_that_the_real_nodes_shared(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated links are as root, elsewhere; here is what a run on them might have said."""

    def distribute(seed: Node, nodes: list[Node], payloads: list[int], *, rtt_ms: float) -> list[Outcome]:
        spent_s = {f"node{i}": spent / len(nodes) for i in range(len(nodes))}
        had_s = dict.fromkeys(spent_s, 0.2)
        return [Outcome(size, 0.17, had_s, size, 0, 0.0, spent_s=spent_s) for size in payloads]

    monkeypatch.setattr(agreement, "distribute", distribute)
    found, cores = {}, os.cpu_count() or 1
    for seconds in (0.05, 1.0):
        spent = seconds * cores
        real, twin, apart = rows(egress.main, capsys, "--real", "4")
        assert real["ratio"] == pytest.approx(0.2 / 0.17)
        assert twin["agreement"] == pytest.approx(twin["ratio"] / real["ratio"])
        found[seconds] = twin["ratio"], apart["ratio"]
    assert found[0.05][1] == found[1.0][1], "with a processor each it does not matter"
    assert found[1.0][0] > max(1.5 * found[0.05][0], 0.8 / 0.17)


@pytest.mark.parametrize("interior", ["kill", "freeze"])
def test_an_interior_node_is_struck(capsys: pytest.CaptureFixture[str], interior: str) -> None:
    (row,) = rows(churn.main, capsys, "--nodes", "6", "--interior", interior)
    assert row["nodes"] == 5
    assert row["missing"] == 0


def test_churn(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(churn.main, capsys, "--nodes", "8", "--per-minute", "20")
    assert row["nodes"] < 8
    assert row["missing"] == 0


@pytest.mark.slow
def test_flash_crowd(capsys: pytest.CaptureFixture[str]) -> None:
    alone, crowded = rows(flash_crowd.main, capsys, "--nodes", "5", "--joiners", "3")
    assert alone["missing"] == crowded["missing"] == 0
    assert crowded["newcomers_s"] < 60


def test_regions(capsys: pytest.CaptureFixture[str]) -> None:
    near, *_, far = rows(regions.main, capsys, "--nodes", "6")
    assert near["crossings"] == 0 < far["crossings"]


def test_trace(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(trace.main, capsys, "--nodes", "12")
    assert 0.05 < max(row["used"]) < 1.1
    assert sum(row["used"]) * 0.2 < row["steps"][0]["seconds"] + 0.2
    assert len(row["last"]) == 8
    last = [way[0] for way in row["last"]]
    assert len({hop["slot"] for hop in last}) == 1
    look = trace.LOOK_S / row["bound_s"]
    assert row["ratio"] <= max(hop["whole_at"] for hop in last) + look
    assert all(0 < hop["whole_at"] < row["ratio"] + 2 * look for way in row["last"] for hop in way)


@pytest.mark.slow
def test_partition(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows(partition.main, capsys, "--nodes", "6")
    assert row["cut_off"] == 3
    assert row["healed_s"] < 120


@pytest.mark.slow
def test_trainer_restart(capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows(trainer_restart.main, capsys, "--nodes", "5"):
        assert row["all_hold"]
        assert row["same_bits"]
        assert row["attempts_left"] in ([0], [1])
        assert row["attempts_left"] == [0] if row["moment"] in ("sealing", "after") else [1]
