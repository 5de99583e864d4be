"""Lets this folder's tests share its kits and that of `tests/processes`, and gives them a swarm to attack."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))
sys.path.insert(0, str(Path(__file__).parent))

from arena_kit import Arena, arena_in


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """A seed and one node, both at version 0. Whatever the test did, both must have come through it."""
    with arena_in(tmp_path) as made:
        yield made
        made.unharmed()


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena_in(tmp_path_factory.mktemp("arena")) as made:
        yield made


@pytest.fixture
def shared_arena(_shared: Arena) -> Iterator[Arena]:
    """The same for all tests of a file, whose attacks leave nothing behind."""
    yield _shared
    _shared.unharmed()
