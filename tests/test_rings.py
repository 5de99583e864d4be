"""The architecture: imports point inward only, the core is pure, only some packages use torch, files stay small."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[1]
RINGS = (
    *("codec", "swarm.guard", "swarm.protocol", "swarm.store", "swarm.transport", "swarm.gossip"),
    *("swarm.runtime", "swarm"),
    *("node.settings", "node.ipc", "node.models", "node.saved"),
    *("node.host", "node.http", "node.status", "node.monitor"),
    "node.tools",
    "node.verification",
    *("node.engines", "node.rewards", "node.ledger", "node.council", "node.gateway"),
    *("node.trainers", "node.coordinator"),
    "node.doctor",
    *("node.member", "node.cli", "node"),
    "scenarios",
)
"""From the inside out; a module may import from its own ring and from those before it."""

IMPURE = {
    *("trio", "asyncio", "anyio", "libp2p", "socket", "ssl", "select", "selectors", "http", "urllib", "requests"),
    *("threading", "multiprocessing", "concurrent", "subprocess", "signal", "time", "secrets", "uuid"),
    *("torch", "transformers", "rich", "cyclopts", "structlog", "logging"),
}
PURE = ("codec", "swarm.protocol", "node.verification")
HEAVY = {"torch", "transformers", "tokenizers", "vllm", "sglang"}
MAX_LINES = 500


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((HOUSE / package).rglob("*.py")):
        name = ".".join(path.relative_to(HOUSE).with_suffix("").parts)
        yield name.removesuffix(".__init__"), path


@cache
def imports(name: str, path: Path) -> list[tuple[str, int]]:
    """Every module that the file names, wherever in it, with the line."""
    return list(_imports(name, path))


def _imports(name: str, path: Path) -> Iterator[tuple[str, int]]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            for alias in node.names:  # `from swarm import runtime` names swarm.runtime
                yield f"{source}.{alias.name}", node.lineno


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def ring(name: str) -> int | None:
    return next((rank for rank, package in enumerate(RINGS) if is_in(name, package)), None)


ALL = [(name, path) for package in ("codec", "swarm", "node", "scenarios") for name, path in modules(package)]


def test_imports_point_inward() -> None:
    outward = []
    for name, path in ALL:
        for imported, line in imports(name, path):
            theirs, ours = ring(imported), ring(name)
            assert ours is not None
            if theirs is not None and theirs > ours:
                outward.append(f"{path.relative_to(HOUSE)}:{line} imports {imported}")
    assert not outward, "\n".join(outward)


def test_no_two_modules_import_each_other_even_through_others() -> None:
    known = {name for name, _ in ALL}
    graph = TopologicalSorter(
        {
            name: {
                module
                for imported, _ in imports(name, path)
                if (module := imported if imported in known else imported.rpartition(".")[0]) in known
                and module != name
            }
            for name, path in ALL
            if path.name != "__init__.py"  # a package names what is in it
        }
    )
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail("a circle of imports: " + " <- ".join(error.args[1]))


def test_the_core_is_pure() -> None:
    impure = [
        f"{path.relative_to(HOUSE)}:{line} imports {imported}"
        for name, path in ALL
        if any(is_in(name, room) for room in PURE)
        for imported, line in imports(name, path)
        if imported.split(".")[0] in IMPURE
    ]
    # `random.Random` is a type of argument; every other name in that module draws from the one hidden generator.
    impure += [
        f"{path.relative_to(HOUSE)}:{node.lineno} uses random.{node.attr}"
        for name, path in ALL
        if any(is_in(name, room) for room in PURE)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id == "random" and node.attr != "Random"
    ]
    assert not impure, "\n".join(impure)


WITH_TORCH = ("node.engines", "node.trainers", "node.models", "scenarios")
"""`node.models`: code about a model's tensors that engines and trainers share."""


def test_torch_stays_with_engines_and_trainers() -> None:
    heavy = [
        f"{path.relative_to(HOUSE)}:{line} imports {imported}"
        for name, path in ALL
        if not any(is_in(name, room) for room in WITH_TORCH)
        for imported, line in imports(name, path)
        if imported.split(".")[0] in HEAVY
        if not (name in ("node.gateway.text", "node.rewards.texts") and imported.split(".")[0] == "tokenizers")
    ]  # that one is small, needs no torch, and is imported only where text is
    assert not heavy, "\n".join(heavy)


def test_libp2p_stays_behind_the_seam() -> None:
    direct = [
        f"{path.relative_to(HOUSE)}:{line} imports {imported}"
        for name, path in ALL
        if not (is_in(name, "swarm.transport") or is_in(name, "swarm.gossip.announcements") or is_in(name, "scenarios"))
        for imported, line in imports(name, path)
        if imported.split(".")[0] == "libp2p"
    ]
    assert not direct, "\n".join(direct)


def test_no_module_has_more_than_500_lines() -> None:
    lines = {path.relative_to(HOUSE): len(path.read_text().splitlines()) for _, path in ALL}
    long = [f"{path} has {count} lines: split it where the ideas part" for path, count in lines.items()
            if count > MAX_LINES]  # fmt: skip
    assert not long, "\n".join(long)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from swarm import runtime", ["swarm.runtime"]),
        ("def f():\n    import trio.abc", ["trio.abc"]),
        ("from . import wire\nfrom ..store import disk", ["swarm.protocol.wire", "swarm.store.disk"]),
    ],
)
def test_the_checker_sees(tmp_path: Path, source: str, expected: list[str]) -> None:
    file = tmp_path / "plan.py"
    file.write_text(source)
    assert [imported for imported, _ in imports("swarm.protocol.plan", file)] == expected


BASE_INSTALL = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "tokenizers", "vllm"}:
            raise ModuleNotFoundError(f"{name} is not in the base install", name=name)

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""


def python(source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", source, *arguments]
    return subprocess.run(command, cwd=HOUSE, capture_output=True, text=True, timeout=120, check=False)


def test_the_base_install_needs_no_torch() -> None:
    """Everything but engines and trainers loads where torch cannot be imported."""
    names = [name for name, _ in ALL if not any(is_in(name, room) for room in WITH_TORCH)]
    done = subprocess.run(
        [sys.executable, "-c", BASE_INSTALL, *names],
        cwd=HOUSE,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(names) > 20


HELP = """
import sys
from node.cli.app import run
assert run(["--help"]) == 0 and run(["join", "--help"]) == 0
loaded = {"torch", "transformers", "libp2p", "trio", "numba", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""


def test_help_loads_nothing_heavy() -> None:
    done = python(HELP)
    assert done.returncode == 0, done.stderr
    assert "Examples:\n\n  swarm-node join" in done.stdout


def test_helper_modules_of_tests_have_different_names() -> None:
    """Folders of tests are on the path together, so of two modules with one name the first would hide the other."""
    names = Counter(path.name for path in (HOUSE / "tests").rglob("*_kit.py"))
    assert [name for name, count in names.items() if count > 1] == []
