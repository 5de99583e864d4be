"""The measurement of replicas in memory, on disk and in the engine, on a small model: what is read, and from where."""

from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.long
@pytest.mark.skipif(find_spec("torch") is None, reason="the engine needs torch")
def test_only_a_replica_on_disk_reads_the_model_for_each_version(tmp_path: Path) -> None:
    from scenarios.engines.memory_cost import measure

    rows = {row["replica"]: row for row in measure(tmp_path, 60.0, 1)["rows"]}
    assert rows["disk"]["read_models"] > 0.9
    assert rows["engine"]["read_models"] < 0.2
    assert rows["engine"]["live_reads"][0] > 0
    assert rows["engine"]["live_reads"][1] == 0
    assert rows["ram"]["live_reads"] is None
    assert rows["engine"]["home_models"] < 0.5
