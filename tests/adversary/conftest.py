"""Makes this folder's kits and that of `tests/processes` importable, and provides a swarm to attack."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "processes"))
sys.path.insert(0, str(Path(__file__).parent))

from arena_kit import Arena, arena_in


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    """A seed and one node, both at version 0. After the test both must still be unharmed."""
    with arena_in(tmp_path) as arena:
        yield arena
        arena.unharmed()


@pytest.fixture(scope="module")
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with arena_in(tmp_path_factory.mktemp("arena")) as arena:
        yield arena


@pytest.fixture
def shared_arena(_shared: Arena) -> Iterator[Arena]:
    """One arena for all tests of a file, whose attacks leave no lasting state."""
    yield _shared
    _shared.unharmed()
