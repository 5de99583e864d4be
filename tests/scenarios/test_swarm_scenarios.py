"""The swarm scenarios on the simulator, small: each runs, and says what it promises to say."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from codec.errors import UsageError
from scenarios.emulator.real import Node, Outcome
from scenarios.sim import agreement, churn, egress, flash_crowd, partition, regions, trace
from scenarios.sim.crowd import Begun, Crowd, Step
from scenarios.sim.rows import row_of
from scenarios.sim.simulator import World
from scenarios.sim.virtual import Node as Simulated
from scenarios.trainers import trainer_restart

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


def a_row(case: str, nodes: int, seconds: float) -> dict:
    """As `egress` makes them: 100 MB, a bound of 4.2 s."""
    step = Step(nodes, 10**8, 4.2, seconds, 4.0, 4.5, 101 * 10**6, 0.0, 1.0, 0)
    row = row_of(case, [step])
    return row | egress.beside(row, 200.0, 1000.0)


def test_a_star_and_a_store_are_as_the_help_says() -> None:
    assert egress.beside(a_row("real", 8, 5.0), 200.0, 1000.0) == pytest.approx({"star_s": 32.0, "store_s": 4.8})


def test_egress_draws_swarms_bound_star_and_store_against_n(tmp_path: Path) -> None:
    found = [a_row("real", 4, 4.3), a_row("simulated", 64, 5.0), a_row("simulated", 4, 4.4),
             a_row("simulated", 1000, float("inf"))]  # fmt: skip
    drawn = egress.curves(found)
    assert drawn["swarm, real"] == [(4, 4.3, 1.01)]
    assert drawn["swarm, simulated"] == [(4, 4.4, 1.01), (64, 5.0, 1.01)], "in order, and none for whoever had it never"
    assert [point.nodes for point in drawn["bound B"]] == [4, 64, 1000]
    assert [point.copies for point in drawn["star"]] == [4, 64, 1000]
    assert [point.seconds for point in drawn["star"]] == pytest.approx([16, 256, 4000])
    assert drawn["object store"] == [(count, pytest.approx(4.8), 1.0) for count in (4, 64, 1000)]
    egress.draw(found, tmp_path / "egress.png")
    assert (tmp_path / "egress.png").read_bytes().startswith(b"\x89PNG")


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
        assert real["star_s"] == pytest.approx(4 * (4 << 20) * 8e-6 / 200)
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


def test_nodes_go_in_several_ways_and_come_at_a_rate_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: list[str] = []
    befall = churn._remove

    def watched(world: World, begun: Begun, how: str, node: Simulated) -> None:
        ways.append(how)
        befall(world, begun, how, node)

    monkeypatch.setattr(churn, "_remove", watched)
    went = "--nodes", "12", "--per-minute", "60", "--joins-per-minute", "30", "--how", *churn.HOW
    (row,) = rows(churn.main, capsys, *went)
    assert row["case"] == "leave+kill+freeze"
    assert set(ways) == set(churn.HOW)
    assert row["nodes"] < 12


def test_when_nodes_go_and_come() -> None:
    assert churn.moments(10, 60.0, 0.4, None) == [(0, True), (15, False), (30, True), (45, False)], "in turn"
    assert churn.moments(10, 60.0, 0.2, 0.3) == [(0, True), (0, False), (20, False), (30, True), (40, False)]
    assert churn.moments(10, 60.0, 0.0, 0.0) == []


def test_who_goes_after_it_had_the_version_counts_as_one_that_stayed() -> None:
    """Of sixteen one is killed at the publish, and one that has it at half of the time in which they are to go."""
    due = churn.moments(16, 4 * (16 << 20) * 8e-6 / 200, 6.0, None)
    assert [goes for _, goes in due] == [True, False, True, False]
    went = churn.churn(Crowd(16, congestion="bbr"), 16 << 20, 0, 6.0, ["kill"])
    assert went.first_s < due[2][0] < went.seconds
    assert (went.nodes, went.missing) == (15, 0)


def test_when_everybody_is_to_go_one_stays() -> None:
    went = churn.churn(Crowd(4), 4 << 20, 0, 1000.0, ["kill"])
    assert (went.nodes, went.missing) == (1, 0)


@pytest.mark.slow
def test_flash_crowd(capsys: pytest.CaptureFixture[str]) -> None:
    alone, crowded = rows(flash_crowd.main, capsys, "--nodes", "5", "--joiners", "3")
    assert alone["missing"] == crowded["missing"] == 0
    assert crowded["newcomers_s"] < 60


@pytest.mark.slow
@pytest.mark.long
def test_as_many_newcomers_as_nodes_do_not_slow_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """1.20 bounds alone, 1.15 with them; 1.92 before guests waited for the others. One seed is one run."""
    assert flash_crowd.main(["--nodes", "32", "--joiners", "32", "--mib", "50", "--congestion", "bbr", "--json"]) == 0
    alone, crowded = json.loads(capsys.readouterr().out)["rows"]
    assert crowded["ratio"] < 1.05 * alone["ratio"]
    assert crowded["copies"] < 1.03
    assert crowded["missing"] == crowded["newcomers_missing"] == 0


def test_regions(capsys: pytest.CaptureFixture[str]) -> None:
    near, *_, far = rows(regions.main, capsys, "--nodes", "6")
    assert near["crossings"] == 0 < far["crossings"]
    home, *others = far["entered"].values()
    assert len(others) == 5
    assert max(others) == far["crossings"]
    assert home == far["entered"]["us-east"]


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
    assert row["same_bits"]


@pytest.mark.slow
def test_trainer_restart(capsys: pytest.CaptureFixture[str]) -> None:
    """Each moment is what it is called; a dead attempt is forgotten, and a sealed one is not made again."""
    found = {row["moment"]: row for row in rows(trainer_restart.main, capsys, "--nodes", "5")}
    assert list(found) == ["extracting", "dealing", "sealing", "after"]
    for moment, row in found.items():
        assert row["all_hold"]
        assert row["same_bits"]
        sealed = moment in ("sealing", "after")
        assert row["attempts_left"] == ([0] if sealed else [1])
        assert (row["second_attempt_copies"] is None) == sealed
        assert (row["knew_seal"] > 0) == (moment == "after")
    assert found["extracting"]["chunks_made"] == 0
    assert 0 < found["dealing"]["chunks_out"] <= found["dealing"]["chunks_made"] < found["dealing"]["chunks"]
    assert found["sealing"]["chunks_made"] == found["after"]["chunks_made"] == found["after"]["chunks"]


# ---------------------------------------------------------------- when it goes wrong


def failed(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[list[dict], str]:
    """The rows of a run that failed, and what it said. The table is made as well."""
    assert main([*arguments, "--mib", "4"]) == 1
    capsys.readouterr()
    assert main([*arguments, *SMALL]) == 1
    said = capsys.readouterr()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(said.out, parse_constant=refuse)["rows"], said.err.splitlines()[-1]


@pytest.mark.parametrize("scenario", [egress, churn, flash_crowd, regions])
def test_nodes_without_the_version_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, scenario
) -> None:
    step = Step(6, 4 << 20, 0.2, float("inf"), float("inf"), float("inf"), 5 << 20, 0.0, 0.0, 6, {"us-east": 0.0})
    monkeypatch.setattr(egress, "simulate", lambda *args: ([step], "digest", 1))
    monkeypatch.setattr(churn, "churn", lambda *args: step)
    monkeypatch.setattr(flash_crowd, "flash_crowd", lambda *args, **more: (step, float("inf"), 2))
    monkeypatch.setattr(regions, "gather", lambda *args: None)
    monkeypatch.setattr(regions, "step", lambda *args: step)
    found, said = failed(scenario.main, capsys)
    assert found[0]["ratio"] is None
    assert found[0]["steps"][0]["seconds"] is None
    assert said.startswith(f"{scenario.__name__.rpartition('.')[2]}: 6 of 6 nodes never had the version")


def test_a_real_swarm_that_does_not_come_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*args: object) -> tuple[dict, ...]:
        raise UsageError("node3 never had version 0.2.")

    monkeypatch.setattr(egress, "compare", compare)
    found, said = failed(egress.main, capsys, "--real", "4")
    assert found == []
    assert said == "egress: 4 real nodes: node3 never had version 0.2."


def test_a_partition_that_does_not_heal_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "heal", lambda world: None)
    monkeypatch.setattr(partition, "PATIENCE_S", 1)
    ((row,), said) = failed(partition.main, capsys, "--nodes", "4", "--cut-s", "30")
    assert row["healed_s"] is None
    assert said == "partition: 2 of 4 nodes did not hold the version 1 s after the network healed (seed 0)."


def test_a_trainer_that_does_not_come_back_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "restart_authority", lambda world, sealed: None)
    monkeypatch.setattr(trainer_restart, "PATIENCE_S", 1)
    ((row,), said) = failed(trainer_restart.main, capsys, "--nodes", "4", "--moment", "sealing")
    assert not row["all_hold"]
    assert said == "trainer_restart: 4 of 4 nodes did not hold the version after 1 s (killed while sealing, seed 0)."


def test_different_bits_are_an_error() -> None:
    row = {"missing": 0, "all_hold": True, "same_bits": False, "seed": 3, "moment": "after", "nodes": 4}
    assert trainer_restart.wrong(row) == ["nodes ended with different bits (killed while after, seed 3)"]
    assert partition.wrong(row) == ["nodes ended with different bits (seed 3)"]
    assert not partition.wrong(row | {"same_bits": True})
    assert not trainer_restart.wrong(row | {"same_bits": True})
