"""miles' disk-delta transport publishes to a swarm of processes, and its requests get tokens from one.

miles is on no package index. `MILES_SOURCE=CLONE pytest -m long tests/node/trainers/test_miles.py` has its own code, at
`COMMIT`, write the versions, control the engine and draw the samples.
"""

import os
from pathlib import Path
from typing import Final

import pytest
from published_kit import drawing, train
from slime_kit import check_trained, checked_out, engine

COMMIT: Final = "31f1ca961a94cb860cec3b2dea34ec332bfa8f76"
SOURCE: Final = os.environ.get("MILES_SOURCE")
STEPS: Final = 3


@pytest.mark.long
def test_miles_trains_on_the_swarm_and_a_lost_node_costs_no_sample(tmp_path: Path) -> None:
    out, own = tmp_path / "out", {}
    out.mkdir()
    if SOURCE is not None:
        own["MILES_SOURCE"] = str(checked_out(SOURCE, COMMIT, "miles", tmp_path / "source"))
    with drawing(tmp_path, "--max-lag", "0", names=("lost", "stays")) as (swarm, base, gateway), engine(gateway) as url:
        words = swarm.home("seed"), url, base, out, swarm.pid("lost"), swarm.home("stays")
        report = train(swarm, "miles_run.py", *words, name="miles", **own)
        assert swarm.running["lost"].poll() is not None, "the node was not killed"
    check_trained(report, STEPS)
