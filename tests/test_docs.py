"""The documents say what the code does, where that can be checked."""

import contextlib
import io
import re
from functools import cache
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
PAGES = (HOUSE / "README.md", HOUSE / "CONTRIBUTING.md", HOUSE / "CHANGELOG.md", *sorted((HOUSE / "docs").glob("*.md")))
SCRIPTS = (HOUSE / "Makefile", HOUSE / "install.sh", HOUSE / ".ci" / "run")
ROOMS = "codec|swarm|node|scenarios|tests|tools|docs|examples"


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
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
    for page in PAGES:
        lines = page.read_text().replace("\\\n", " ").splitlines()
        found += [(page.name, line.partition(" #")[0].strip()) for line in lines if line.strip().startswith(prefix)]
    assert found
    return found


@cache
def flags_of(*command: str) -> set[str]:
    """What `--help` of a command of swarm-node names."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert run([*command, "--help"]) == 0
    return set(re.findall(r"--[a-z][a-z-]*", told.getvalue()))


def test_flags_that_people_are_told_to_type_exist() -> None:
    for page, line in typed("swarm-node "):
        words = line.split()[1:]
        known = flags_of(*(words[:3] if words[1:2] == ["key"] else words[:1]))
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", line)) <= known, (page, line)


@pytest.mark.parametrize(("page", "line"), typed("python -m scenarios.") + typed("python -m node."))
def test_modules_that_people_are_told_to_run_exist(page: str, line: str) -> None:
    path = HOUSE / line.split()[2].replace(".", "/")
    source = next(file for file in (path.with_suffix(".py"), path / "__main__.py") if file.exists()).read_text()
    for flag in re.findall(r"(?<=\s)--([a-z][a-z-]*)", line):
        assert flag in source or flag.replace("-", "_") in source, (page, flag)


def text_of(page: Path) -> str:
    """Return a page without the changelog's entry on modules that moved, which names old modules too."""
    return re.sub(r"(?ms)^- \*\*Modules have moved\.\*\*.*?(?=^- |^#)", "", page.read_text())


FILES = {path.name for room in ROOMS.split("|") for path in (HOUSE / room).rglob("*.*")} | {
    path.name for path in HOUSE.iterdir()
}


GROUPS = {"Guide": "Guides", "Specification": "Specifications"}
"""The group in which the README links a page of this kind, where its name is not that of the kind."""


@pytest.mark.parametrize("page", sorted((HOUSE / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_says_for_whom_it_is_and_is_linked_in_that_group(page: Path) -> None:
    kind = re.match(r"# .+\n\n\*(Guide|Reference|Specification|For contributors)[.:] .+\*\n", page.read_text())
    assert kind is not None
    group = re.search(rf"^{GROUPS.get(kind[1], kind[1])}:\n(.+?)(?=^\w)", README.split("## Links")[1], re.M | re.S)
    assert group is not None
    assert f"(docs/{page.name})" in group[1]


def module(name: str) -> Path | None:
    """The file that `python -m NAME` runs."""
    path = HOUSE / name.replace(".", "/")
    return next((each for each in (path.with_suffix(".py"), path / "__main__.py") if each.is_file()), None)


def lost(page: Path) -> list[str]:
    """Paths, files, modules, tests and make targets that a page or script names and that are not there."""
    text = text_of(page)
    paths = re.findall(rf"(?<![\w/.<-])(?:{ROOMS})/[\w./-]*\w/?", text)
    gone = [path for path in paths if not (HOUSE / path).exists()]
    gone += [name for name in re.findall(r"-m ((?:scenarios|node|tools)(?:\.\w+)+)", text) if module(name) is None]
    gone += [name for name in re.findall(r"`(\w+\.(?:py|md|sh))`", text) if name not in FILES]
    for name in re.findall(rf"`((?:{ROOMS})(?:\.[a-z_]\w*)+)`", text):
        if name not in NOT_MODULES and not (HOUSE / name.replace(".", "/")).is_dir() and module(name) is None:
            gone.append(name)
    for path, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        if not re.search(rf"def {test}\b", (HOUSE / path).read_text()):
            gone.append(f"{path}::{test}")
    targets = re.findall(r"^([a-z-]+):", (HOUSE / "Makefile").read_text(), re.M)
    return gone + [name for name in re.findall(r"`make ([a-z-]+)", text) if name not in targets]


NOT_MODULES = ("swarm.toml", "swarm.openai_url", "swarm.state")
"""A file of settings, and attributes of a trainer's `swarm`."""


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert not lost(page)


@pytest.mark.parametrize(
    "text",
    [
        "see docs/nothing.md",
        "`python -m scenarios.nothing`",
        "`nothing.py`",
        "`swarm.nothing`",
        "tests/test_docs.py::test_nothing",
        "`make nothing`",
    ],
)
def test_the_checker_sees_what_is_gone(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert len(lost(page)) == 1


def quoted(prefix: str) -> list[tuple[str, str]]:
    """(page, command) of what stands in backticks within sentences and tables, and has a flag."""
    found = [(page.name, line) for page in PAGES for line in re.findall(r"`([^`\n]+)`", page.read_text())]
    return sorted({(page, line) for page, line in found if line.startswith(prefix) and " --" in line})


def test_flags_in_sentences_exist() -> None:
    for page, line in quoted("swarm-node "):
        words = line.split()[1:]
        command = words[:2] if words[0] == "config" else words[:1]
        if command[0].startswith("-") or command[0].isupper():
            continue
        assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", line)) <= flags_of(*command), (page, line)


@pytest.mark.parametrize(("page", "line"), quoted("python -m "))
def test_flags_of_modules_in_sentences_exist(page: str, line: str) -> None:
    path = module(line.split()[2])
    assert path is not None, page
    source = "".join(each.read_text() for each in path.parent.glob("*.py"))  # some share their flags
    for flag in re.findall(r"(?<=\s)--([a-z][a-z-]*)", line):
        assert f'"--{flag}"' in source or re.search(rf"\b{flag.replace('-', '_')}\b", source), (page, flag)


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
