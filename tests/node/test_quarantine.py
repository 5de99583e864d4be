"""`swarm-node quarantine`: an operator's decision about a node is durable before the command answers."""

import json
from pathlib import Path

import pytest
from seed_kit import running

from node.cli.app import run


def test_a_node_is_quarantined_listed_and_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running(tmp_path) as seed:
        key, home = seed.node.key.public.hex(), ("--home", str(tmp_path))

        def run_quarantine(*words: str) -> dict:
            assert run(["quarantine", *words, *home, "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        assert run_quarantine() == {"changed": False, "quarantine": {}, "record": []}
        quarantined = run_quarantine(key, "--why", "a test")
        assert quarantined["changed"]
        assert [entry["what"] for entry in quarantined["record"]] == ["quarantined"]
        assert [penalty["why"] for penalty in run_quarantine()["quarantine"].values()] == ["a test"]
        assert not run_quarantine(key)["changed"], "it is in quarantine already"
        free = run_quarantine(key, "--release")
        assert (free["changed"], free["quarantine"]) == (True, {})
        assert [entry["what"] for entry in free["record"]] == ["quarantined", "released"]
        assert run(["quarantine", "nobody", *home]) == 2
        assert run(["quarantine", "--release", *home]) == 2
    assert run(["quarantine", *home]) == 3
