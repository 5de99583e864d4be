"""The checkpoint that a catch-up writes: each block once, and at any failure nothing wrong is believed."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from runtime_kit import AUTHORITY, CONFIG, Killed, new_replica

from codec import Checkpoint, Layout, Manifest, Replica, TensorSpec
from codec.errors import UsageError
from codec.staging import block_hash
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.model import Model
from swarm.store import Disk, DiskFull, Store

PLACES = pytest.mark.parametrize("on_disk", [False, True], ids=["ram", "disk"])


class CountingDisk(Disk):
    """Counts the bytes that it writes to the files of checkpoints."""

    nbytes = 0

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int, path: Path) -> None:
        self._count(path, len(data))
        super().write_at(descriptor, data, offset, path)

    def write_parts_at(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> None:
        self._count(path, sum(map(len, parts)))
        super().write_parts_at(descriptor, parts, offset, path)

    def write_pages(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> int:
        written = super().write_pages(descriptor, parts, offset, path)
        self._count(path, written)
        return written

    def _count(self, path: Path, nbytes: int) -> None:
        if path.suffix == ".safetensors":
            self.nbytes += nbytes


def truth_of_pages() -> Replica:
    """A model whose blocks are whole pages, and one small tensor that is not."""
    replica = Replica.create(Layout((TensorSpec("a", "BF16", (64, 4096)), TensorSpec("b", "BF16", (100,)))))
    for block in range(replica.layout.n_blocks):
        bits = replica.block(block) + 3 + block
        replica.write_block(block, bits.tobytes(), block_hash(bits))
    return replica


def catch_up(store: Store, truth: Replica, on_disk: bool) -> Model:
    """What a node does that lacks the model: open, fetch what differs, confirm, have a checkpoint."""
    store.put_file(truth.layout.to_bytes())
    store.put_file(CONFIG)
    manifest = Manifest(AUTHORITY.public, 0, 0, 0, bytes(32), truth.root, truth.layout.hash, (), 0, 0)
    model = Model(store, on_disk=lambda *sizes: on_disk)
    if model.restore() is None:
        model.open(truth.layout.hash)
        for block in model.differing(truth.hashes):
            model.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 0))
        assert model.replay(manifest, manifest.seal(AUTHORITY)) == ()
        assert model.write_checkpoint() == VersionId(0, 0)
    model.close()
    return model


def bits_of(model: Model) -> list[bytes]:
    assert model.replica is not None
    return [model.replica.read_block(block) for block in range(model.replica.layout.n_blocks)]


@PLACES
@pytest.mark.parametrize("make", [new_replica, truth_of_pages])
def test_a_joiner_writes_the_model_once(tmp_path: Path, on_disk: bool, make: Callable[[], Replica]) -> None:
    truth, disk = make(), CountingDisk()
    with Store(tmp_path, AUTHORITY.public, disk) as store:
        model = catch_up(store, truth, on_disk)
        head_bytes = 4096
        assert disk.nbytes == truth.layout.nbytes + head_bytes or disk.nbytes == truth.layout.full_bytes + head_bytes
        assert bits_of(model) == [truth.read_block(block) for block in range(truth.layout.n_blocks)]
        (saved,) = store.checkpoints.list()
        assert saved.trusted
        assert Checkpoint.open(saved.folder).layout.tensors == truth.layout.tensors


@PLACES
def test_a_kill_at_any_step_of_a_catch_up_loses_only_the_block_in_flight(tmp_path: Path, on_disk: bool) -> None:
    truth = truth_of_pages()
    wanted = [truth.read_block(block) for block in range(truth.layout.n_blocks)]
    for count in range(1000):
        folder, steps = tmp_path / str(count), iter(range(count))

        def before(step: str, path: Path, steps=steps) -> None:
            if next(steps, None) is None:
                raise Killed

        with Store(folder, AUTHORITY.public) as store:
            store.disk.before = before
            try:
                catch_up(store, truth, on_disk)
                killed = False
            except Killed:
                killed = True
        with Store(folder, AUTHORITY.public) as store:
            model = Model(store, on_disk=lambda *sizes: on_disk)
            if model.restore() is not None:
                assert bits_of(model) == wanted
            assert bits_of(catch_up(store, truth, on_disk)) == wanted, count
        if not killed:
            assert count > 20
            return


class FailingDisk(Disk):
    """Writes half of what the `count`-th write should, and then fails with `error`."""

    def __init__(self, count: int, error: BaseException) -> None:
        super().__init__()
        self.left, self.error = count, error
        self.failed = False

    def write_at(self, descriptor: int, data: bytes | memoryview, offset: int, path: Path) -> None:
        self._fail(descriptor, [bytes(data)], offset, path)
        super().write_at(descriptor, data, offset, path)

    def write_parts_at(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> None:
        self._fail(descriptor, parts, offset, path)
        super().write_parts_at(descriptor, parts, offset, path)

    def write_pages(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> int:
        self._fail(descriptor, parts, offset, path)
        return super().write_pages(descriptor, parts, offset, path)

    def _fail(self, descriptor: int, parts: Sequence[bytes], offset: int, path: Path) -> None:
        self.left -= 1
        if self.left == 0:
            self.failed = True
            data = b"".join(map(bytes, parts))
            with open(path, "r+b") as file:
                file.seek(offset)
                file.write(data[: len(data) // 2])
            with self.errors(path):
                raise self.error


@PLACES
@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull, "is full"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), UsageError, "has failed"),
        (Killed(), Killed, ""),
    ],
    ids=["full", "failing", "killed"],
)
def test_a_write_that_ends_in_the_middle_is_found(
    tmp_path: Path, on_disk: bool, error: BaseException, raised: type[BaseException], text: str
) -> None:
    truth = truth_of_pages()
    wanted = [truth.read_block(block) for block in range(truth.layout.n_blocks)]
    for count in range(1, 100):
        disk = FailingDisk(count, error)
        with Store(tmp_path / str(count), AUTHORITY.public, disk) as store:
            failures = []
            try:
                catch_up(store, truth, on_disk)
            except raised as caught:
                failures.append(str(caught))
        assert all(text in said for said in failures)
        assert len(failures) == disk.failed
        with Store(tmp_path / str(count), AUTHORITY.public) as store:
            for _, data, digest in store.partial.load(truth.layout):
                assert blake3(data).digest() == digest
            assert bits_of(catch_up(store, truth, on_disk)) == wanted
        if not disk.failed:
            assert count > 3
            return


@PLACES
def test_an_unfinished_catch_up_of_an_earlier_release_is_continued(tmp_path: Path, on_disk: bool) -> None:
    """It wrote `partial`, with each block at its offset in memory, and `partial.list`."""
    truth = new_replica()
    with Store(tmp_path, AUTHORITY.public) as store:
        spec = truth.layout.block(1)
        with (tmp_path / "partial").open("wb") as file:
            file.seek(spec.offset)
            file.write(truth.read_block(1))
        (tmp_path / "partial.list").write_bytes(truth.layout.hash + (1).to_bytes(8, "little"))
        store.put_file(truth.layout.to_bytes())
        model = Model(store, on_disk=lambda *sizes: on_disk)
        model.open(truth.layout.hash)
        assert 1 not in model.differing(truth.hashes)
        assert len(model.differing(truth.hashes)) == truth.layout.n_blocks - 1
        assert bits_of(catch_up(store, truth, on_disk)) == [
            truth.read_block(block) for block in range(truth.layout.n_blocks)
        ]
        assert not (tmp_path / "partial").exists()
        assert not (tmp_path / "partial.list").exists()


def test_blocks_of_another_model_are_removed(tmp_path: Path) -> None:
    one, other = new_replica(), truth_of_pages()
    with Store(tmp_path, AUTHORITY.public) as store:
        store.partial.add(one.layout, 0, *one.read(0))
        store.partial.add(other.layout, 0, *other.read(0))
        assert list(store.partial.load(one.layout)) == []
        assert list(store.partial.load(other.layout)) == [(0, *other.read(0))]
