"""Every path and every name of the code in `docs/architecture.md` exists.

The names in the second cell of a table's row are looked up in the module or folder that the first cell names, and all
others in all modules of the product.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
PAGE = (HOUSE / "docs" / "architecture.md").read_text()
ROOMS = ("codec", "swarm", "node", "scenarios", "tests", "tools", "docs", "examples")
PATH = re.compile(rf"(?<![\w/.])(?:{'|'.join(ROOMS)})/[\w/]*(?:\.\w+)?")
NAME = re.compile(r"_?[A-Za-z]\w*(?:\.\w+)*")

Defined = dict[str, set[str]]
"""The names at the top of a module, each with the names inside of it (methods, fields, members)."""


def targets(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node.name
    elif isinstance(node, ast.Assign):
        yield from (target.id for target in node.targets if isinstance(target, ast.Name))
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        yield node.target.id


@cache
def defined(path: Path) -> Defined:
    body = ast.parse(path.read_text()).body
    return {
        name: {inner for part in node.body for inner in targets(part)} if isinstance(node, ast.ClassDef) else set()
        for node in body
        for name in targets(node)
    }


def modules(*paths: str) -> list[Path]:
    found = [HOUSE / path for path in paths]
    return [each for path in found for each in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]


def exists(name: str, paths: list[Path]) -> bool:
    """Whether one of these modules defines `name`: `verify_piece`, `Exchange.push`, `WorkLease`, `soft_ttl_s`."""
    outer, _, inner = name.partition(".")
    for path in paths:
        names = defined(path)
        if inner and inner in names.get(outer, ()):
            return True
        if not inner and (outer in names or (not outer[0].isupper() and any(outer in own for own in names.values()))):
            return True
    return False


def spoken(line: str) -> tuple[list[str], list[str]]:
    """(paths, names) in backticks. A command is neither."""
    ticked = re.findall(r"`([^`]+)`", line)
    paths = [word for word in ticked if PATH.fullmatch(word)]
    return paths, [word for word in ticked if NAME.fullmatch(word) and word not in paths]


EVERYWHERE = modules("codec", "swarm", "node", "scenarios")
OTHERS = {"README.md", "swarm.toml", "SWARM_"}
"""In backticks, and neither a path of a room nor a name of the code."""


def missing(page: str) -> list[str]:
    lost = [path for path in PATH.findall(page) if not (HOUSE / path).exists()]
    for line in page.splitlines():
        hop = re.match(r"\| `([^`]+)` \| (`[^|]+)\|", line)  # where it is, then its names
        if hop and PATH.fullmatch(hop[1]) and (HOUSE / hop[1]).exists():
            lost += [f"{name} of {hop[1]}" for name in spoken(hop[2])[1] if not exists(name, modules(hop[1]))]
            line = line[hop.end() :]
        lost += [name for name in spoken(line)[1] if name not in OTHERS and not exists(name, EVERYWHERE)]
        for module in re.findall(r"python -m ([\w.]+)", line):
            if not (HOUSE / module.replace(".", "/")).with_suffix(".py").exists():
                lost.append(module)
    return lost


def test_the_page_names_what_exists() -> None:
    assert not missing(PAGE)


def test_the_page_names_enough_to_be_checked() -> None:
    assert len(set(PATH.findall(PAGE))) > 60
    assert len({name for line in PAGE.splitlines() for name in spoken(line)[1]}) > 100


@pytest.mark.parametrize(
    "text",
    [
        "see `swarm/protocol/person.py`",
        "by `Peer.jump`",
        "by `Jumper`",
        "| `codec/chunk.py` | `Peer.apply` | a row whose name stands elsewhere |",
        "subgraph x [node/nowhere/]",
        "`python -m tools.nothing`",
    ],
)
def test_the_checker_sees_what_is_gone(text: str) -> None:
    assert len(missing(text)) == 1


@pytest.mark.parametrize(
    "text",
    ["`swarm/protocol/member.py`", "`Peer.apply`", "| `codec/` | `open_header` |", "`soft_ttl_s`", "`BAN_S`"],
)
def test_the_checker_knows_what_is_there(text: str) -> None:
    assert not missing(text)


def test_a_hop_stands_in_every_table_of_a_way() -> None:
    """The three ways are described hop by hop, each with its module."""
    ways = re.findall(r"^## The way of .+?(?=^## )", PAGE, re.M | re.S)
    assert len(ways) == 3
    for way in ways:
        assert len(re.findall(r"^\| `\w+/[^`]+` \| `", way, re.M)) >= 10
