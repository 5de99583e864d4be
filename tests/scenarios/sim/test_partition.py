"""A partition that outlasts the leases: its far side returns nearly as fast as new nodes join."""

import json

import pytest

from scenarios.sim import partition


@pytest.mark.parametrize(
    "one_way",
    [
        [],
        pytest.param(["--one-way", "in"], marks=pytest.mark.slow),
        pytest.param(["--one-way", "out"], marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_those_who_were_cut_off_return_as_fast_as_new_nodes_join(
    one_way: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--nodes 8 --cut-s 180 --every-s 30 --mib 2 --most 1.3 --json"
    assert partition.main([*words.split(), *one_way]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["versions"] == 6
    assert row["cut_off"] == 4
    assert row["equivocations"] == 0
    assert row["healed_s"] <= 1.3 * row["fresh_s"]
