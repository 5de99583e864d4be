"""How the WAN table judges an outcome. `tests/wan/test_real.py` runs real swarms."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scenarios.emulator import wan_table
from scenarios.emulator.real import WARM_UPS, Node, Outcome, bound_s
from scenarios.emulator.wan_table import ROWS, draw, main, print_table, row_of
from scenarios.harness.usage import ProcessUsage

MIB = 1 << 20


def outcome(seconds: float, *, sent: float = 1.01, crossed: float = 1.0, twice: float = 0.0) -> Outcome:
    size = 100 * MIB
    return Outcome(
        size, 4.2, {"node0": seconds / 2, "node1": seconds}, int(sent * size), 0, twice, {"eu": crossed}, 0.5
    )


def test_the_bound() -> None:
    bits = 8e8 * (1 + 52 / 9000)
    assert bound_s(10**8, 200, [Node(200)] * 4) == pytest.approx(bits / 200e6)
    assert bound_s(10**8, 200, [Node(200, down_mbit=50)]) == pytest.approx(bits / 50e6)
    assert bound_s(10**8, 1000, [Node(0)] * 4) == pytest.approx(4 * bits / 1000e6)


@pytest.mark.parametrize(
    ("name", "seconds", "more", "missed"),
    [
        ("4", 4.6, {}, ""),
        ("4", 4.7, {}, "time"),
        ("4", 4.6, {"sent": 1.04}, "bytes"),
        ("regions", 4.9, {"crossed": 1.05}, ""),
        ("regions", 4.95, {"crossed": 1.2}, "time, crossings"),
        ("killed", 5.4, {"sent": 1.09, "twice": 0.0199}, ""),
        ("killed", 5.4, {"sent": 1.09, "twice": 0.0201}, "duplicates"),
    ],
)
def test_targets_that_count_as_reached(
    capsys: pytest.CaptureFixture[str], name: str, seconds: float, more: dict[str, float], missed: str
) -> None:
    print_table([row_of(name, ROWS[name], [outcome(seconds, **more)])])
    assert capsys.readouterr().out.rstrip().endswith(f"not {missed}" if missed else "  reached")


def test_a_row_shows_the_median_and_keeps_every_run() -> None:
    row = row_of("8", ROWS["8"], [outcome(5.0), outcome(9.0), outcome(4.5)])
    assert row["seconds"] == 5.0
    assert row["runs"] == pytest.approx([5.0 / 4.2, 9.0 / 4.2, 4.5 / 4.2])


def test_a_quarter_of_the_bandwidth() -> None:
    assert {node.up_mbit for node in ROWS["8-quarter"].nodes} == {50.0}
    assert ROWS["8-quarter"].seed.up_mbit == 50.0


def test_only_the_rows_of_a_first_version_count_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them in a new swarm; other rows measure all their versions in one."""
    runs: list[tuple[int, int]] = []

    def distribute(seed: Node, nodes: object, sizes: list[int], *, warm_ups: int, **rest: object) -> list[Outcome]:
        runs.append((warm_ups, len(sizes)))
        return [outcome(4.4)] * len(sizes)

    monkeypatch.setattr(wan_table, "distribute", distribute)
    assert len(wan_table.measure(ROWS["8-first"], 3)) == 3
    assert runs == [(0, 1)] * 3
    runs.clear()
    assert len(wan_table.measure(ROWS["8"], 3)) == 3
    assert runs == [(WARM_UPS, 3)]


def test_a_failed_row_is_reported_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(case: object, repeats: int, on_outcome: object) -> list[Outcome]:
        if case is ROWS["8"]:
            raise RuntimeError("no route")
        return [outcome(4.4)] * repeats

    monkeypatch.setattr(wan_table, "measure", run)
    monkeypatch.setattr(wan_table, "check_privileges", lambda: None)
    assert main(["--rows", "8", "4", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["failed"] == "RuntimeError: no route"
    assert rows[1]["reached_time"]
    print_table(rows)
    output = capsys.readouterr().out
    assert "failed: RuntimeError: no route" in output
    assert "reached" in output
    draw(rows, tmp_path / "wan.png")
    assert (tmp_path / "wan.png").stat().st_size > 0


def test_the_table_shows_the_cpu_time_of_each_kind_of_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spent = {"seed": 1.5, "node0": 0.75, "node1": 1.25, "wire": 1.0}
    monkeypatch.setattr(wan_table, "check_privileges", lambda: None)
    monkeypatch.setattr(wan_table, "measure", lambda case, repeats, on_outcome: [report_outcome(on_outcome, spent)])
    assert main(["--rows", "4", "--cpu"]) == 0
    output = capsys.readouterr().err
    assert "seed 1.50, a node 1.00 (10.0 ms for each MiB of F), emulated wire 1.00; all 4.5" in output
    assert main(["--rows", "4"]) == 0
    assert "processor seconds" not in capsys.readouterr().err


def report_outcome(on_outcome: Callable[[Outcome], None], spent: dict[str, float]) -> Outcome:
    measured = replace(outcome(4.5), spent_s=spent)
    on_outcome(measured)
    return measured


def test_the_cpu_seconds_of_a_process() -> None:
    sum(range(3_000_000))
    assert ProcessUsage(os.getpid()).cpu_s > 0
    assert ProcessUsage(2**30).cpu_s == 0  # there is no such process
