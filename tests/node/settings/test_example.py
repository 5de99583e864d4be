"""The example of swarm.toml and the JSON schema: complete, true, and accepted."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from node.cli.app import app, run
from node.settings.definitions import CONFIGURABLE, keys_of, settings_of
from node.settings.example import example, schema
from node.settings.sources import explain
from node.settings.toml_file import TomlFile


def uncommented() -> str:
    """The example with every setting in force."""
    return re.sub(r"(?m)^#(?=[a-z_]+ = )", "", example())


def test_the_example_covers_every_setting_of_every_command(tmp_path: Path) -> None:
    file = tmp_path / "swarm.toml"
    file.write_text(uncommented())
    read = TomlFile(file)
    for command in CONFIGURABLE:
        assert {key for table, key in read.entries if table == command} == keys_of(command)
    assert all(entry.line for entry in read.entries.values())
    assert {key for table, key in read.entries if not table} == {"home", "name", "region", "up_mbit", "down_mbit"}


def test_the_example_shows_the_defaults() -> None:
    content = tomllib.loads(uncommented())
    for command in CONFIGURABLE:
        for key, setting in settings_of(command).items():
            if not setting.own and setting.default not in (None, "", []):
                assert content[command][key] == setting.default, (command, key)


def test_each_setting_in_the_example_has_its_help() -> None:
    lines = example().splitlines()
    for at, line in enumerate(lines):
        if re.match(r"#[a-z_]+ = ", line):
            assert re.match(r"# \S", lines[at - 1]), line
    assert max(map(len, lines)) <= 120


def test_as_it_is_the_example_sets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["config", "init"]) == 0
    assert tomllib.loads((tmp_path / "swarm.toml").read_text()) == {command: {} for command in CONFIGURABLE}
    for command in CONFIGURABLE:
        sources = {entry["source"] for key, entry in explain(app, command).items() if key != "home"}
        assert sources == {"default"}


def test_init_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "swarm.toml").write_text("region = 'eu'\n")
    assert run(["config", "init"]) == 2
    assert "is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "swarm.toml").read_text() == "region = 'eu'\n"
    assert run(["config", "init", "deploy/other.toml"]) == 0
    assert "SWARM_CONFIG" in capsys.readouterr().err
    assert run(["config", "init", "--stdout"]) == 0
    assert capsys.readouterr().out.startswith("# Settings of swarm-node")


# ---------------------------------------------------------------- the schema


def accepts(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value fits the keywords that our schema uses; another keyword is an error here."""
    assert set(schema) <= {
        *("$schema", "title", "description", "default", "type", "enum", "items", "properties", "additionalProperties")
    }
    if "enum" in schema and value not in schema["enum"]:
        return False
    kinds = schema.get("type", [])
    python = {
        "string": str, "number": (int, float), "integer": int, "boolean": bool, "array": list, "object": dict,
    }  # fmt: skip
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        isinstance(value, python[kind]) and (kind == "boolean") == isinstance(value, bool) for kind in kinds
    ):
        return False
    if isinstance(value, list):
        return all(accepts(schema["items"], each) for each in value)
    if isinstance(value, dict):
        known = schema["properties"]
        return set(value) <= set(known) and all(accepts(known[key], each) for key, each in value.items())
    return True


def test_the_schema_accepts_the_example_and_refuses_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(schema()))
    content = tomllib.loads(uncommented())
    assert accepts(printed, content)
    for command, key, wrong in (("join", "up_mbit", "x"), ("join", "engine", "vlm"), ("seed", "copy_base", "no")):
        assert not accepts(printed, content | {command: content[command] | {key: wrong}})
    assert not accepts(printed, content | {"jion": {}})
    assert not accepts(printed, {"join": {"up_mbti": 1}})


def test_the_schema_has_every_setting_with_its_help_and_default() -> None:
    for command in CONFIGURABLE:
        properties = schema()["properties"][command]["properties"]
        assert set(properties) == keys_of(command)
        for key, setting in settings_of(command).items():
            assert properties[key]["description"] == setting.help
            assert len(setting.help) > 10
            assert properties[key].get("default") == (None if setting.own else setting.default)
