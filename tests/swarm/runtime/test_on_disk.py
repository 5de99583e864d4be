"""A start from disk hashes nothing after a clean shutdown, and proves or repairs everything after any other end.

Also: a replica that is kept on disk, as a checkpoint and the chunks since."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from runtime_kit import AUTHORITY, CONFIG, here_and_now, new_replica
from test_model import version

from codec import Layered, Manifest, Replica
from swarm.protocol.core.events import VersionId
from swarm.runtime import Manifests, RuntimeLimits
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.jobs import Jobs
from swarm.runtime.replica.model import Model
from swarm.store import Store

PLACES = pytest.mark.parametrize("disk", [False, True], ids=["ram", "disk"])


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home", AUTHORITY.public) as opened:
        yield opened


def model_of(store: Store, disk: bool) -> Model:
    return Model(store, on_disk=lambda *sizes: disk)


def started(store: Store, disk: bool = True) -> tuple[Replica, Model]:
    """The trainer's replica, and a node's model at version 0."""
    truth = new_replica()
    genesis(store, Model(store), new_replica(), AUTHORITY, files={"config.json": CONFIG})
    model = model_of(store, disk)
    assert model.restore() is not None
    assert isinstance(model.replica, Layered) is disk
    assert root_of(model) == truth.root
    return truth, model


def commit(model: Model, manifest: Manifest, sealed: bytes) -> None:
    model.prepare(manifest, sealed)
    model.apply(manifest)


def restarted(store: Store, disk: bool = True) -> Model:
    """Restore as the next process would."""
    model = model_of(store, disk)
    model.restore()
    return model


def root_of(model: Model) -> bytes:
    assert model.replica is not None
    return model.replica.root


def bits_of(model: Model) -> bytes:
    assert model.replica is not None
    return b"".join(model.replica.read_block(block) for block in range(model.replica.layout.n_blocks))


def bits(replica: Replica) -> bytes:
    return b"".join(replica.read_block(block) for block in range(replica.layout.n_blocks))


def weights_of(store: Store) -> Path:
    return store.checkpoints.list()[0].folder / "model.safetensors"


def lie(path: Path, back: int) -> None:
    """Flip bits as a failing disk does: the file keeps its size, time and inode."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-back, os.SEEK_END)
        byte = file.read(1)
        file.seek(-back, os.SEEK_END)
        file.write(bytes([byte[0] ^ 0x10]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


class Hashed:
    """Counts hashed bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        for module in (
            "codec.staging",
            "codec.replica",
            "codec.layered",
            "swarm.runtime.replica.model",
            "swarm.runtime.replica.restore",
        ):
            for name in ("blake3", "block_hash"):
                monkeypatch.setattr(f"{module}.{name}", self._counting(name), raising=False)

    def _counting(self, name: str):
        def hashed(data):
            self.nbytes += memoryview(data).nbytes
            digest = blake3(memoryview(data).cast("B"))
            return digest if name == "blake3" else digest.digest()

        return hashed


def closed_at_3(store: Store, disk: bool) -> Replica:
    """What a model that was closed at version 0.3 is."""
    truth, model = started(store, disk)
    for number in (1, 2, 3):
        commit(model, *version(store, truth, number))
    model.close()
    return truth


@PLACES
def test_after_a_clean_shutdown_a_start_hashes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    truth = closed_at_3(store, disk)
    hashed = Hashed(monkeypatch)
    resumed = restarted(store, disk)
    assert hashed.nbytes == 0
    assert resumed.version == VersionId(0, 3)
    assert root_of(resumed) == truth.root
    while resumed.audit(1):
        pass
    assert hashed.nbytes == len(bits(truth))
    assert bits_of(resumed) == bits(truth)


@PLACES
def test_without_a_clean_shutdown_a_start_hashes_every_block(
    store: Store, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    truth = closed_at_3(store, disk)
    restarted(store, disk)  # and is killed
    hashed = Hashed(monkeypatch)
    resumed = restarted(store, disk)
    assert hashed.nbytes == len(bits(truth))  # every block once, for any number of versions since the checkpoint
    assert resumed.audit() == 0
    assert bits_of(resumed) == bits(truth)


@pytest.mark.parametrize("touched", ["time", "inode", "size", "file"])
def test_a_checkpoint_that_was_touched_is_hashed(store: Store, monkeypatch: pytest.MonkeyPatch, touched: str) -> None:
    _, model = started(store)
    model.close()
    path = weights_of(store)
    match touched:
        case "time":
            os.utime(path)
        case "inode":
            shutil.copy2(path, path.with_name("copy"))
            path.with_name("copy").replace(path)
        case "size":
            path.open("ab").write(b"\0")
        case "file":
            path.with_name("more").write_bytes(b"")
    hashed = Hashed(monkeypatch)
    resumed = restarted(store)
    assert hashed.nbytes > 0
    assert resumed.audit() == 0


@PLACES
@pytest.mark.parametrize("noticed_by", ["audit", "read", "checkpoint", "copy"])
def test_damage_by_a_disk_is_found_before_a_block_is_given_away(store: Store, disk: bool, noticed_by: str) -> None:
    truth, model = started(store, disk)
    commit(model, *version(store, truth, 1))
    model.close()
    lie(weights_of(store), 8)
    resumed = restarted(store, disk)
    found: list[int] = []
    resumed.on_damage = found.append
    assert resumed.version == VersionId(0, 1)
    assert resumed.replica is not None
    match noticed_by:
        case "audit":
            while resumed.audit(1):
                pass
        case "read":
            served = [resumed.read_block(block) for block in range(truth.layout.n_blocks)]
            assert all(given is None or given[1] == truth.read_block(b) for b, given in enumerate(served))
            assert None in served
        case "checkpoint":
            assert resumed.write_checkpoint() is None
        case "copy":
            assert resumed.read(lambda replica: 1) is None
    assert found == [1]
    assert resumed.version is None
    assert len(resumed.differing(truth.hashes)) == 1
    resumed.close()  # leaves no note of a clean shutdown
    assert not store.clean.take().vouches_for(store.checkpoints.list()[0])


@PLACES
def test_damage_is_repaired_by_fetching_one_block(store: Store, disk: bool) -> None:
    truth, model = started(store, disk)
    made = version(store, truth, 1)
    commit(model, *made)
    model.close()
    lie(weights_of(store), 8)
    for clean in (True, False):  # found while in use, and found by a start that hashes
        resumed = restarted(store, disk)
        if clean:
            while resumed.audit():
                pass
        else:
            assert resumed.nearly is not None
            assert (resumed.nearly.root, resumed.lost) == (truth.root, 1)
        resumed.open(truth.layout.hash)
        bad = resumed.differing(truth.hashes)
        assert len(bad) == 1
        for block in bad:
            resumed.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 1))
        assert resumed.replay(*made) == ()
        assert resumed.version == VersionId(0, 1)
        assert bits_of(resumed) == bits(truth)
        resumed.close()  # leaves no note: the checkpoint is still damaged
    assert resumed.write_checkpoint() == VersionId(0, 1)
    resumed.close()
    resumed = restarted(store, disk)
    assert resumed.audit() > 0
    assert resumed.version == VersionId(0, 1)
    assert bits_of(resumed) == bits(truth)


@PLACES
async def test_a_damaged_checkpoint_is_written_again(store: Store, disk: bool) -> None:
    truth, model = started(store, disk)
    made = version(store, truth, 1)
    commit(model, *made)
    assert model.write_checkpoint() == VersionId(0, 1)
    model.close()
    lie(weights_of(store), 8)
    resumed = restarted(store, disk)
    jobs = Jobs(store, resumed, Manifests(AUTHORITY.public), RuntimeLimits(), here_and_now)
    while resumed.audit():
        pass
    assert await jobs.write_due_checkpoint(force=False) is None  # nothing can be written before the repair
    resumed.open(truth.layout.hash)
    for block in resumed.differing(truth.hashes):
        resumed.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 1))
    assert resumed.replay(*made) == ()
    assert await jobs.write_due_checkpoint(force=False) == VersionId(0, 1)
    assert await jobs.write_due_checkpoint(force=True) is None
    assert isinstance(resumed.replica, Layered) is disk
    assert bits_of(restarted(store, disk)) == bits(truth)


def test_a_version_on_disk_writes_nothing(store: Store) -> None:
    truth, model = started(store)
    before = {path: path.stat().st_mtime_ns for path in store.folder.rglob("*") if "anchors" in path.parts}
    for number in range(1, 4):
        commit(model, *version(store, truth, number))
        assert bits_of(model) == bits(truth)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert not store.replica_path.exists()


def test_a_new_checkpoint_on_disk_replaces_the_older_one_and_its_chunks(store: Store) -> None:
    truth, model = started(store)
    for number in range(1, 4):
        commit(model, *version(store, truth, number))
    replica = model.replica
    assert isinstance(replica, Layered)
    assert model.write_checkpoint() == VersionId(0, 3)
    for number in range(4):
        store.chunks.drop(VersionId(0, number))
    assert model.replica is replica
    assert bits_of(model) == bits(truth)
    commit(model, *version(store, truth, 4))
    assert bits_of(model) == bits(truth)
    assert bits_of(restarted(store)) == bits(truth)


def test_versions_that_arrive_while_a_checkpoint_is_written_are_kept(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, model = started(store)
    commit(model, *version(store, truth, 1))
    write = store.write_checkpoint

    def slow(*arguments):
        write(*arguments)
        commit(model, *version(store, truth, 2))

    monkeypatch.setattr(store, "write_checkpoint", slow)
    assert model.write_checkpoint() == VersionId(0, 1)
    assert model.version == VersionId(0, 2)
    store.chunks.drop(VersionId(0, 1))
    assert bits_of(model) == bits(truth)


def test_the_file_lent_to_an_engine_is_written_only_when_it_is_lent(store: Store) -> None:
    truth, model = started(store)
    for number in range(1, 4):
        commit(model, *version(store, truth, number))
        if number != 2:
            loan = model.lend()
            assert loan is not None
            assert (loan.version, loan.root) == (VersionId(0, number), truth.root)
            mapped = Replica.attach(os.dup(loan.fd), loan.layout, truth.hashes.copy())
            assert bits(mapped) == bits(truth)
        else:
            assert bits(mapped) != bits(truth)  # as it was lent
    assert model.write_checkpoint() is not None
    assert store.replica_path.exists()  # the engine still has it mapped
    model.close()
    assert not store.replica_path.exists()


def test_a_loan_that_has_ended_takes_no_disk_until_the_next_one(store: Store) -> None:
    truth, model = started(store)
    loan = model.lend()
    assert loan is not None
    mapped = Replica.attach(os.dup(loan.fd), loan.layout, truth.hashes.copy())
    model.end_loan()
    assert store.replica_path.stat().st_size >= truth.layout.nbytes
    assert not any(bits(mapped))
    commit(model, *version(store, truth, 1))
    assert bits_of(model) == bits(truth)
    loan = model.lend()
    assert loan is not None
    assert bits(mapped) == bits(truth)
    assert loan.root == truth.root


def test_a_replica_on_disk_catches_up_in_the_files_of_its_next_checkpoint(store: Store) -> None:
    truth, model = started(store)
    made = version(store, truth, 1)
    model.open(truth.layout.hash)
    for block in model.differing(truth.hashes):
        model.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 1))
    inode = (store.partial.files / "model.safetensors").stat().st_ino
    assert model.replay(*made) == ()
    assert model.write_checkpoint() == VersionId(0, 1)
    assert weights_of(store).stat().st_ino == inode
    assert not store.partial.files.exists()
    assert not store.replica_path.exists()
    commit(model, *version(store, truth, 2))
    assert bits_of(model) == bits(truth)


@PLACES
def test_a_kill_is_no_clean_shutdown(store: Store, disk: bool) -> None:
    truth, model = started(store, disk)
    for number in (1, 2, 3):
        commit(model, *version(store, truth, number))
    del model  # no close
    resumed = restarted(store, disk)
    assert resumed.version == VersionId(0, 3)
    assert root_of(resumed) == truth.root
    assert bits_of(resumed) == bits(truth)


@pytest.mark.slow
@PLACES
def test_a_kill_at_every_step_that_touches_the_disk(tmp_path: Path, disk: bool) -> None:
    """Start, commit two versions, write a checkpoint, commit another, end: killed before the first durable step, the
    second, ... until none is left. Each time the next start stands at the newest version whose seal was durable, and
    can prove it.
    """
    with Store(tmp_path / "begun", AUTHORITY.public) as store:
        genesis(store, Model(store), new_replica(), AUTHORITY, files={"config.json": CONFIG})
    for kill_at in range(1000):
        folder = tmp_path / str(kill_at)
        shutil.copytree(tmp_path / "begun", folder)
        with Store(folder, AUTHORITY.public) as store:
            roots, killed = _killed_at(store, kill_at, disk)
            newest = store.newest()
        with Store(folder, AUTHORITY.public) as store:
            resumed = restarted(store, disk)
            assert newest is not None
            assert resumed.version == newest.id, kill_at
            assert root_of(resumed) == roots[newest.id.version]
            assert resumed.replica is not None
            for block in range(resumed.replica.layout.n_blocks):
                data, digest = resumed.replica.read(block)
                assert blake3(data).digest() == digest, kill_at
        shutil.rmtree(folder)
        if not killed:
            assert kill_at > 20
            return


def _killed_at(store: Store, kill_at: int, disk: bool) -> tuple[list[bytes], bool]:
    """Run until the process is killed. Returns the roots of the versions made, and whether it was killed."""
    steps = iter(range(kill_at))

    def before(step: str, path: Path) -> None:
        if next(steps, None) is None:
            raise Killed

    store.disk.before = before
    truth = new_replica()
    roots = [truth.root]
    try:
        model = restarted(store, disk)
        for number in (1, 2, 3):
            made = version(store, truth, number)
            roots.append(truth.root)
            commit(model, *made)
            if number == 2:
                model.write_checkpoint()
        model.close()
    except Killed:
        return roots, True
    finally:
        store.disk.before = lambda step, path: None
    return roots, False


def test_a_replica_moves_between_memory_and_disk(store: Store) -> None:
    truth, model = started(store)
    for number, disk in enumerate((False, True, False), 1):
        commit(model, *version(store, truth, number))
        model.close()
        model = restarted(store, disk)
        assert isinstance(model.replica, Layered) is disk
        assert bits_of(model) == bits(truth)
        assert np.array_equal(model.replica.hashes, truth.hashes)
