"""One term a concept: retired words stay out of names, and the glossary points at files that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
ROOMS = ("codec", "swarm", "node", "scenarios", "examples", "tests")
LIST = Path(__file__).with_name("retired_words.txt")
GLOSSARY = HOUSE / "docs" / "glossary.md"


def retired() -> dict[str, str]:
    """Each retired word, and what stands for it now."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split(maxsplit=1) for line in lines)


def words(name: str) -> list[str]:
    """The words of an identifier: `late_joiner`, `_LateJoiner` and `LATE_JOINER_S` have `late` and `joiner`."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)]


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module defines: classes, functions, arguments, variables and attributes, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def _may_have(gone: dict[str, str]) -> re.Pattern[str]:
    """Finds all that `words` may take for one of these words, and more."""
    later = [shape for word in gone for shape in (word.title(), word.upper())]  # in the middle of CamelCase
    return re.compile(rf"(?<![A-Za-z])(?i:{'|'.join(gone)})|{'|'.join(later)}")


def found(path: Path, text: str, gone: dict[str, str]) -> list[str]:
    if not _may_have(gone).search(f"{path.stem} {text}"):  # to parse every file takes long
        return []
    places = [(path.stem, 1), *names(ast.parse(text))]
    return [
        f"{path}:{line} {name}: say {gone[word]} instead of {word}"
        for name, line in places
        for word in words(name)
        if word in gone
    ]


def test_retired_words_are_gone_from_names() -> None:
    gone = retired()
    left = [
        line
        for room in ROOMS
        for path in sorted((HOUSE / room).rglob("*.py"))
        for line in found(path.relative_to(HOUSE), path.read_text(), gone)
    ]
    assert not left, "\n".join(left)


@pytest.mark.parametrize(
    "text", ["class Desk: ...", "def open_desk(): ...", "def f(desk): ...", "DESK_S = 1", "self._desk = 1"]
)
def test_the_checker_sees_a_retired_word(text: str) -> None:
    assert len(found(Path("a.py"), text, {"desk": "trainer server"})) == 1


def test_a_longer_word_is_another_word() -> None:
    assert not found(Path("a.py"), "desktop = helpdesk = 1", {"desk": "trainer server"})


def test_every_term_of_the_glossary_has_a_file() -> None:
    rows = re.findall(r"^\| (.+?) \| .+? \| `(.+?)` \|$", GLOSSARY.read_text(), re.M)
    missing = [f"{term}: {path}" for term, path in rows if not (HOUSE / path).exists()]
    assert len(rows) > 30
    assert not missing, "\n".join(missing)


def test_the_glossary_has_one_row_a_term_in_order() -> None:
    terms = re.findall(r"^\| ([a-z].+?) \| .+? \| `.+?` \|$", GLOSSARY.read_text(), re.M)
    assert terms == sorted(set(terms))
