"""Answers to requests for blocks: which of two counts when one was requested from a second member."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from runtime_kit import new_replica

from swarm.protocol.core.events import PartsDone, VersionId
from swarm.protocol.core.wire import WantBlock
from swarm.runtime.sessions.blob_service import BlobService
from swarm.runtime.sessions.requests import PeerAnswer, Requests

FIRST, SECOND = b"first", b"second"
LABEL = VersionId(0, 1)


class Disk:
    """A model of which blocks are written, and what happens at a write."""

    def __init__(self) -> None:
        self.replica = new_replica()
        self.layout = self.replica.layout
        self.written: list[int] = []
        self.at_write: Callable[[], None] = lambda: None

    def write_block(self, block: int, data: bytes, expected_hash: bytes, label: VersionId) -> None:
        assert (expected_hash, label) == (self.replica.hashes[block].tobytes(), LABEL)
        self.written.append(block)
        self.at_write()


def service_for(disk: Disk) -> BlobService:
    async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)

    store: Any = SimpleNamespace(hashes=lambda root: disk.replica.hashes)
    manifests: Any = SimpleNamespace(root=lambda label: disk.replica.root)
    jobs: Any = SimpleNamespace(model=disk)
    return BlobService(store, jobs, manifests, at_once)


def answer(number: int) -> PeerAnswer:
    return PeerAnswer(WantBlock(number, 0), LABEL, b"")


async def test_only_the_answer_to_the_newest_request_is_written() -> None:
    disk = Disk()
    service = service_for(disk)
    service.note_request(FIRST, Requests(0), WantBlock(1, 0))
    service.note_request(SECOND, Requests(0), WantBlock(2, 0))
    assert await service.accept_answer(FIRST, answer(1)) is None
    assert disk.written == []
    done = await service.accept_answer(SECOND, answer(2))
    assert isinstance(done, PartsDone)
    assert (done.peer, done.request, disk.written) == (SECOND, 2, [0])
    assert await service.accept_answer(SECOND, answer(2)) is None, "it counts once"


async def test_an_answer_counts_whose_request_was_sent_while_an_older_answer_was_written() -> None:
    """The core ignores the older answer by then, so without the newer one it would wait until the deadline."""
    disk = Disk()
    service = service_for(disk)
    service.note_request(FIRST, Requests(0), WantBlock(1, 0))
    disk.at_write = lambda: service.note_request(SECOND, Requests(0), WantBlock(2, 0))
    await service.accept_answer(FIRST, answer(1))
    disk.at_write = lambda: None
    done = await service.accept_answer(SECOND, answer(2))
    assert isinstance(done, PartsDone)
    assert (done.peer, done.request, disk.written) == (SECOND, 2, [0, 0])
