"""A person's word about a node, by the command line, durable before it is answered."""

import json
from pathlib import Path

import pytest
from seed_kit import running

from node.cli.app import run


def test_a_node_is_put_aside_shown_and_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running(tmp_path) as seed:
        key, home = seed.node.key.public.hex(), ("--home", str(tmp_path))

        def said(*words: str) -> dict:
            assert run(["quarantine", *words, *home, "--json"]) == 0
            return json.loads(capsys.readouterr().out)

        assert said() == {"changed": False, "quarantine": {}, "record": []}
        aside = said(key, "--why", "a test")
        assert aside["changed"]
        assert [entry["what"] for entry in aside["record"]] == ["quarantined"]
        assert [penalty["why"] for penalty in said()["quarantine"].values()] == ["a test"]
        assert not said(key)["changed"], "it is there already"
        free = said(key, "--release")
        assert (free["changed"], free["quarantine"]) == (True, {})
        assert [entry["what"] for entry in free["record"]] == ["quarantined", "released"]
        assert run(["quarantine", "nobody", *home]) == 2
        assert run(["quarantine", "--release", *home]) == 2
    assert run(["quarantine", *home]) == 3
