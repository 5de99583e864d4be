"""Every row of `docs/attacks.md` names at least one test, and each named test exists."""

import ast
import re
from functools import cache
from pathlib import Path

HOUSE = Path(__file__).parents[1]
PAGE = (HOUSE / "docs" / "attacks.md").read_text()
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def table_rows() -> list[list[str]]:
    """The rows of tables whose last column is the test, without heads and rules."""
    rows, in_table = [], False
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip()[1:-1].split("|")]
        if not line.startswith("|"):
            in_table = False
        elif cells[-1] == "test":
            in_table = True
        elif in_table and not set(line) <= set("|- :"):
            rows.append(cells)
    return rows


@cache
def functions_of(path: Path) -> set[str]:
    """The functions in a file that pytest collects, by their names."""
    found = ast.walk(ast.parse(path.read_text()))
    return {
        node.name
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_attack_names_a_test_that_exists() -> None:
    rows = table_rows()
    assert len(rows) >= 30
    missing = []
    for cells in rows:
        assert len(cells) == 4, f"attack, what happens, bound, test: {cells}"
        named = NAMED.findall(cells[3])
        if not named:
            missing.append(f"{cells[0]}: no test")
        for file, name in named:
            path = HOUSE / file
            if not path.is_file() or name not in functions_of(path):
                missing.append(f"{cells[0]}: {file}::{name} does not exist")
    assert not missing, "\n".join(missing)


def test_every_adversary_test_is_in_the_page() -> None:
    """Every test of `tests/adversary` is in a row of the page."""
    named = {f"{file}::{name}" for file, name in NAMED.findall(PAGE)}
    missing = [
        f"{path.relative_to(HOUSE)}::{name}"
        for path in sorted((HOUSE / "tests" / "adversary").glob("test_*.py"))
        for name in sorted(functions_of(path))
        if f"{path.relative_to(HOUSE)}::{name}" not in named
    ]
    assert not missing, "\n".join(missing)


def test_each_row_of_the_audit_is_in_the_page() -> None:
    """Each of the 22 audit findings has its number in the first column of a row."""
    numbers = {int(number) for cells in table_rows() for number in re.findall(r"\((\d+)\)", cells[0])}
    assert set(range(1, 23)) <= numbers, f"missing: {sorted(set(range(1, 23)) - numbers)}"
