"""The table of control costs in docs/leases.md, and the trainer's few connections."""

import json

import pytest

from scenarios.sim import control


def test_control_messages_stay_small_and_planning_works(capsys: pytest.CaptureFixture[str]) -> None:
    assert control.main(["--members", "10", "300", "--json"]) == 0
    small, large = json.loads(capsys.readouterr().out)["rows"]
    assert large["heartbeat"] < small["heartbeat"] + 20
    assert large["report"] <= small["report"] + 4
    assert small["report"] < small["report_links"] < 500
    assert large["change_leaves"] < large["roster"] / 20
    assert all(row[name] > 0 for row in (small, large) for name in row)


@pytest.mark.slow
@pytest.mark.long
def test_the_trainer_keeps_few_connections_while_all_nodes_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert control.main(["--sessions", "80", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["at_rest"] <= row["kept"] + 10
    assert row["after_a_step"] <= row["kept"] + 10
    assert row["a_root_child_dies"] <= row["kept"] + 10
    assert row["fresh_at_the_end"] == 79
