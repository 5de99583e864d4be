"""What one process may send, hold and queue, by the hunt's own count."""

from types import SimpleNamespace
from typing import Any

import pytest

from codec import ChunkKey, FileSpec, Layout, TensorSpec
from scenarios.hunt.bounds import Bounds
from scenarios.hunt.oracle import Oracle
from swarm.protocol.authority import Authority
from swarm.protocol.core.events import Gave, HeaderStored, LocalBudget, LocalChunk, SendBlock, SendHeader, SendPiece
from swarm.protocol.core.version import VersionId
from swarm.protocol.member import Peer
from swarm.runtime.sessions.blob_service import model_bytes

KEY = ChunkKey(0, 1, 0, 0)
LAYOUT = Layout((TensorSpec("a", "BF16", (8, 8)),), (FileSpec("config.json", 2, bytes(32)),))
HEADER = HeaderStored(None, None, KEY, bytes(32), bytes(32), (1000, 500), 100)


def core_with(kind: type, copies: float | None = None, versions: int = 0) -> Any:
    """A core that knows one chunk, and keeps so many versions."""
    core = object.__new__(kind)
    ids = [VersionId(0, number) for number in range(versions)]
    core.egress = SimpleNamespace(copies=copies)
    core.state = SimpleNamespace(
        chunks=SimpleNamespace(
            find=lambda key: SimpleNamespace(sizes=(1000, 500), header_bytes=100) if key == KEY else None,
            versions={id_: SimpleNamespace(manifest=object()) for id_ in ids},
        ),
        manifests=dict.fromkeys(ids, b""),
        tuning=SimpleNamespace(retain_versions=16),
        held=max(ids, default=None),
    )
    return core


def test_a_seed_may_send_so_many_copies_of_the_model_and_of_each_version() -> None:
    oracle = Oracle(LAYOUT)
    bounds = Bounds(core_with(Authority, 2.0), oracle, "seed")
    bounds.note_event(LocalChunk(HEADER))
    bounds.note_event(Gave(b"node", 2 * model_bytes(LAYOUT)))
    for _ in range(2):
        bounds.note_effect(SendHeader(b"node", 0, KEY))
        bounds.note_effect(SendPiece(b"node", 0, KEY, 0))
        bounds.note_effect(SendPiece(b"node", 0, KEY, 1))
    assert oracle.violations == []
    bounds.note_effect(SendPiece(b"node", 0, KEY, 1))
    assert [each.name for each in oracle.violations] == ["egress within its cap"]


def test_a_node_sends_no_content_once_its_day_is_used_up() -> None:
    oracle = Oracle(LAYOUT)
    bounds = Bounds(core_with(Peer), oracle, "node1")
    for spent in (False, True, False):
        bounds.note_event(LocalBudget(saving=True, spent=spent))
        bounds.note_effect(SendBlock(b"node", 1, 0))
        assert [each.name for each in oracle.violations] == ["daily limit kept"] * spent
        oracle.violations.clear()


def test_without_a_cap_everything_may_be_sent() -> None:
    oracle = Oracle(LAYOUT)
    bounds = Bounds(core_with(Authority), oracle, "seed")
    bounds.note_event(Gave(b"node", 1 << 40))
    assert oracle.violations == []


@pytest.mark.parametrize(
    ("versions", "pieces", "queued", "bounded"),
    [(16, 80 << 20, 5 << 20, True), (17, 0, 0, False), (0, (80 << 20) + 1, 0, False), (0, 0, (5 << 20) + 1, False)],
)
def test_what_a_process_holds_is_bounded(versions: int, pieces: int, queued: int, bounded: bool) -> None:
    oracle = Oracle(LAYOUT)
    runtime = SimpleNamespace(
        _store=SimpleNamespace(chunks=SimpleNamespace(memory_bytes=pieces)),
        peers=[SimpleNamespace(_queued_bytes=queued)],
    )
    Bounds(core_with(Authority, versions=versions), oracle, "seed").check_memory(runtime)
    assert {each.name for each in oracle.violations} == (set() if bounded else {"memory bounded"})
