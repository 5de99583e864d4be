"""A replica that is kept in a file: it goes on after a clean end, proves or repairs itself after any other."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shell_kit import AUTHORITY, CONFIG, new_replica
from test_model import version

from codec import Layout, Manifest, Replica
from swarm.protocol.events import VersionId
from swarm.shell.model import Model
from swarm.shell.seed import genesis
from swarm.store import Store


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home", AUTHORITY.public) as opened:
        yield opened


def on_disk(model_bytes: int) -> bool:
    return True


def begun(store: Store) -> tuple[Replica, Model]:
    """The trainer's replica, and a node's model at version 0, kept on disk."""
    truth = new_replica()
    genesis(store, Model(store), new_replica(), AUTHORITY, files={"config.json": CONFIG})
    model = Model(store, on_disk=on_disk)
    assert model.restore() is not None
    assert model.replica is not None
    assert model.replica.on_disk
    assert model.replica.root == truth.root
    return truth, model


def commit(model: Model, manifest: Manifest, sealed: bytes) -> None:
    model.prepare(manifest, sealed)
    model.scatter(manifest)


def again(store: Store) -> Model:
    """What the next process makes of the folder."""
    model = Model(store, on_disk=on_disk)
    model.restore()
    return model


def bits_of(model: Model) -> bytes:
    assert model.replica is not None
    layout: Layout = model.replica.layout
    return b"".join(model.replica.read_block(block) for block in range(layout.n_blocks))


def test_a_clean_end_is_taken_up_without_hashing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, model = begun(store)
    commit(model, *version(store, truth, 1))
    model.close()
    monkeypatch.setattr(Replica, "rehash", None)
    monkeypatch.setattr(Model, "_load", None)
    resumed = again(store)
    assert resumed.version == VersionId(0, 1)
    assert resumed.replica is not None
    assert resumed.replica.root == truth.root
    assert resumed.unproven
    assert resumed.audit() == ()
    assert not resumed.unproven


def test_what_a_bad_disk_changed_is_found_while_it_is_in_use_and_repaired_at_the_next_start(store: Store) -> None:
    truth, model = begun(store)
    commit(model, *version(store, truth, 1))
    model.close()
    path = store.working.path
    with path.open("r+b") as file:
        file.write(b"\xff\xee")
    record = store.folder / "replica.json"  # as if the file's time had not changed either
    before = record.read_text()
    status = path.stat()
    told = json.loads(before)
    told["file"] = [status.st_size, status.st_mtime_ns]
    record.write_text(json.dumps(told))
    resumed = again(store)
    assert resumed.audit() == (0,)
    resumed.close()  # leaves nothing to be trusted
    repaired = again(store)
    assert not repaired.unproven
    assert repaired.version == VersionId(0, 1)
    assert repaired.replica is not None
    assert repaired.replica.root == truth.root
    assert repaired.replica.rehash() == []


def test_a_kill_without_a_word(store: Store) -> None:
    truth, model = begun(store)
    for number in (1, 2, 3):
        commit(model, *version(store, truth, number))
    del model  # no close
    resumed = again(store)
    assert not resumed.unproven  # every block was hashed
    assert resumed.version == VersionId(0, 3)
    assert resumed.replica is not None
    assert resumed.replica.root == truth.root


@pytest.mark.parametrize("written", range(4))
@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_in_the_middle_of_a_scatter(store: Store, written: int, torn: bool) -> None:
    """So many blocks were written, the next one perhaps in part; the version's seal is durable, so it must come out."""
    truth, model = begun(store)
    commit(model, *version(store, truth, 1))
    old = truth.hashes.copy()
    manifest, sealed = version(store, truth, 2)
    model.prepare(manifest, sealed)
    replica = model.replica
    assert replica is not None
    for block in range(truth.layout.n_blocks):
        new, words = np.frombuffer(truth.read_block(block), np.uint16), replica._writable(block)
        if block < written:
            words[:] = new
        elif block == written and torn:
            changed = np.flatnonzero(words != new)
            words[changed[: len(changed) // 2]] = new[changed[: len(changed) // 2]]
    assert not np.array_equal(old, truth.hashes)
    resumed = again(store)
    assert resumed.version == VersionId(0, 2)
    assert resumed.replica is not None
    assert resumed.replica.root == manifest.root
    assert resumed.replica.rehash() == []
    assert bits_of(resumed) == b"".join(truth.read_block(block) for block in range(truth.layout.n_blocks))


@pytest.mark.slow
def test_a_kill_at_every_step_that_touches_the_disk(tmp_path: Path) -> None:
    """Start, commit two versions, end: killed before the first durable step, the second, ... until none is left. Each
    time the next start stands at the newest version whose seal was durable, and can prove it.
    """
    with Store(tmp_path / "begun", AUTHORITY.public) as store:
        genesis(store, Model(store), new_replica(), AUTHORITY, files={"config.json": CONFIG})
    for kill_at in range(1000):
        folder = tmp_path / str(kill_at)
        shutil.copytree(tmp_path / "begun", folder)
        with Store(folder, AUTHORITY.public) as store:
            roots, killed = _killed_at(store, kill_at)
            newest = store.newest()
        with Store(folder, AUTHORITY.public) as store:
            resumed = again(store)
            assert newest is not None
            assert resumed.version == newest.id, kill_at
            assert resumed.replica is not None
            assert resumed.replica.root == roots[newest.id.version]
            assert resumed.replica.rehash() == [], kill_at
        shutil.rmtree(folder)
        if not killed:
            assert kill_at > 10
            return


def _killed_at(store: Store, kill_at: int) -> tuple[list[bytes], bool]:
    """The roots of the versions that were made, and whether it came to the kill."""
    steps = iter(range(kill_at))

    def before(step: str, path: Path) -> None:
        if next(steps, None) is None:
            raise Killed

    store.disk.before = before
    truth = new_replica()
    roots = [truth.root]
    try:
        model = Model(store, on_disk=on_disk)
        model.restore()
        for number in (1, 2):
            made = version(store, truth, number)
            roots.append(truth.root)
            commit(model, *made)
        model.write_anchor()
        model.close()
    except Killed:
        return roots, True
    finally:
        store.disk.before = lambda step, path: None
    return roots, False


def test_a_machine_that_has_memory_again_drops_the_file(store: Store) -> None:
    truth, model = begun(store)
    commit(model, *version(store, truth, 1))
    model.close()
    moved = Model(store)
    assert moved.restore() is not None
    assert moved.replica is not None
    assert not moved.replica.on_disk
    assert moved.replica.root == truth.root
    assert not store.working.path.exists()
