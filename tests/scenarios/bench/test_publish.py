"""The benchmark of publishing, in small: real processes, every role measured."""

import json

import pytest

from scenarios.bench.publish import main

pytestmark = pytest.mark.long


def test_both_kinds_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--gb", "0.03", "--raw-gb", "0.01", "--versions", "2", "--json"]) == 0
    model, raw = json.loads(capsys.readouterr().out)
    assert [row["version"] for row in model["rows"]] == [1, 2]
    assert model["floor_s_gb"]["blake3"] > 0
    assert 0 < model["rows"][1]["delta_bytes"] < 0.01 * model["bytes"]
    assert raw["rows"][0]["delta_bytes"] >= raw["bytes"]
    assert set(raw["rows"][0]["cpu_s_gb"]) == {"seed", "relay", "publisher"}
    assert all(row["opened_s"] <= row["seconds"] for row in model["rows"] + raw["rows"])
    assert all(1 <= row["seed_peak_without_files_models"] < 1.01 * row["peak_models"]["seed"] for row in model["rows"])
