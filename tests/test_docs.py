"""The documents say what the code does, where that can be checked."""

import re
from pathlib import Path

import msgspec
import pytest

import node
from node.cli.app import run
from swarm.protocol.core import wire
from swarm.protocol.core.tuning import Tuning

HOUSE = Path(__file__).parents[1]
PROTOCOL = (HOUSE / "docs" / "protocol.md").read_text()
README = (HOUSE / "README.md").read_text()


def rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_every_message_is_described_with_its_fields() -> None:
    described = {row[1].strip("`"): row for row in rows(PROTOCOL) if row[0].isdigit()}
    messages = {message.__name__: msgspec.inspect.type_info(message) for message in wire.Message.__subclasses__()}
    assert set(described) == set(messages)
    for name, info in messages.items():
        assert isinstance(info, msgspec.inspect.StructType)
        assert described[name][0] == str(info.tag)
        assert re.findall(r"`(\w+)`", described[name][2]) == [field.name for field in info.fields], name


def test_the_presets_are_those_of_the_code() -> None:
    presets = Tuning.wan(), Tuning.lan(), Tuning.loopback()
    checked = 0
    for name, *values in (row for row in rows(PROTOCOL) if row[0].startswith("`") and row[0].endswith("_s`")):
        assert [float(value) for value in values] == [getattr(preset, name.strip("`")) for preset in presets], name
        checked += 1
    assert checked == 5


@pytest.mark.parametrize(
    "page", [HOUSE / "README.md", *sorted((HOUSE / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_linked_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_readme_names_commands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    named = set(re.findall(r"swarm-node ([a-z]+)", README))
    assert {"join", "seed", "delta"} <= named
    for command in named:
        assert run([command, "--help"]) == 0, command
    capsys.readouterr()


def typed(prefix: str) -> list[tuple[str, str]]:
    """(page, line) of every command in the docs that begins with `prefix`, without comments, continued lines joined."""
    found = []
    for page in (HOUSE / "README.md", *sorted((HOUSE / "docs").glob("*.md"))):
        lines = page.read_text().replace("\\\n", " ").splitlines()
        found += [(page.name, line.partition(" #")[0].strip()) for line in lines if line.strip().startswith(prefix)]
    assert found
    return found


@pytest.mark.parametrize(("page", "line"), typed("swarm-node "))
def test_flags_that_people_are_told_to_type_exist(page: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([line.split()[1], "--help"]) == 0
    known = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))
    assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", line)) <= known, page


@pytest.mark.parametrize(("page", "line"), typed("python -m scenarios.") + typed("python -m node."))
def test_modules_that_people_are_told_to_run_exist(page: str, line: str) -> None:
    path = HOUSE / line.split()[2].replace(".", "/")
    source = next(file for file in (path.with_suffix(".py"), path / "__main__.py") if file.exists()).read_text()
    for flag in re.findall(r"(?<=\s)--([a-z][a-z-]*)", line):
        assert flag in source or flag.replace("-", "_") in source, (page, flag)


def test_what_the_trainers_page_names_can_be_imported_from_node() -> None:
    page = (HOUSE / "docs" / "trainers.md").read_text()
    errors = [row[0].strip("`") for row in rows(page.split("## Errors")[1]) if re.fullmatch(r"`\w+`", row[0])]
    assert len(errors) >= 7
    for name in [*errors, "SwarmError", "Publication", "Rollout", "RolloutGroup"]:
        assert name in node.__all__, name
        assert isinstance(getattr(node, name), type), name
    for name, kind in (("group", node.RolloutGroup), ("sample", node.Rollout)):
        table = page.split(f"| of a {name} | |")[1].split("\n\n")[0]
        fields = [f for row in rows(table) for f in re.findall(r"`(\w+)`", row[0])]
        assert fields, name
        for field in fields:
            assert hasattr(kind, field), field
