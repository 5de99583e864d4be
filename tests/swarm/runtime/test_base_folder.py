"""The user's model folder: the store refers to it instead of copying it, and never loses or removes it."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from runtime_kit import AUTHORITY, CONFIG, layout, new_replica
from test_model import version
from test_on_disk import Hashed, bits, bits_of, commit, lie

from codec import Checkpoint, Layered, Manifest, Replica, write_checkpoint
from swarm.protocol.core.events import VersionId
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.model import Model
from swarm.store import Store

PLACES = pytest.mark.parametrize("disk", [False, True], ids=["ram", "disk"])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "user" / "base"
    folder.parent.mkdir()
    write_checkpoint(folder, layout(), new_replica().bits, {"config.json": CONFIG})
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "home", AUTHORITY.public) as opened:
        yield opened


def joined(store: Store, base: Path, disk: bool, **options: bool) -> tuple[Replica, Model]:
    """A node at version 0 whose bits came from `base`."""
    truth = new_replica()
    manifest = Manifest(AUTHORITY.public, 0, 0, 0, bytes(32), truth.root, truth.layout.hash, (), 0, 0)
    store.put_file(truth.layout.to_bytes())
    store.put_file(CONFIG)
    model = Model(store, base=base, on_disk=lambda *sizes: disk, **options)
    assert model.restore() is None
    assert model.open(truth.layout.hash) == truth.root
    model.confirm(manifest, manifest.seal(AUTHORITY))
    assert model.write_checkpoint() == VersionId(0, 0)
    return truth, model


def again(store: Store, base: Path, disk: bool) -> Model:
    model = Model(store, base=base, on_disk=lambda *sizes: disk)
    model.restore()
    return model


def copied(store: Store) -> list[Path]:
    return sorted((store.folder / "anchors").rglob("*.safetensors"))


@PLACES
def test_a_base_folder_is_referred_to_and_a_clean_restart_hashes_nothing(
    store: Store, base: Path, monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    truth, model = joined(store, base, disk)
    assert copied(store) == []
    assert store.checkpoints.list()[0].folder == base
    for number in (1, 2):
        commit(model, *version(store, truth, number))
    model.close()
    hashed = Hashed(monkeypatch)
    resumed = again(store, base, disk)
    assert hashed.nbytes == 0
    assert resumed.version == VersionId(0, 2)
    assert isinstance(resumed.replica, Layered) is disk
    assert bits_of(resumed) == bits(truth)
    assert resumed.write_checkpoint() == VersionId(0, 2)
    assert len(copied(store)) == 1
    assert Checkpoint.open(base).layout == truth.layout, "the user's folder stays when the reference goes"


@PLACES
def test_a_base_folder_is_copied_when_asked(store: Store, base: Path, disk: bool) -> None:
    truth, _ = joined(store, base, disk, refer=False)
    assert len(copied(store)) == 1
    shutil.rmtree(base)
    assert bits_of(again(store, base, disk)) == bits(truth)


def change_time(base: Path) -> None:
    os.utime(base / "model.safetensors", ns=(1, 1))


def change_bits(base: Path) -> None:
    with (base / "model.safetensors").open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(range(1, 101)))


def replace(base: Path) -> None:
    words = new_replica(seed=1)
    shutil.rmtree(base)
    write_checkpoint(base, words.layout, words.bits, {"config.json": CONFIG})


def remove(base: Path) -> None:
    shutil.rmtree(base)


def cut_off(base: Path) -> None:
    os.truncate(base / "model.safetensors", 5000)


CHANGES = pytest.mark.parametrize("change", [change_time, change_bits, replace, remove, cut_off])


@PLACES
@CHANGES
def test_a_base_folder_that_changed_between_runs_is_repaired_or_reported(
    store: Store, base: Path, disk: bool, change
) -> None:
    truth, model = joined(store, base, disk)
    made = version(store, truth, 1)
    commit(model, *made)
    model.close()
    change(base)
    resumed = Model(store, on_disk=lambda *sizes: disk)
    found = resumed.restore()
    assert resumed.changed_base == base
    assert (found is not None) is (change is change_time)
    if found is None:
        assert resumed.version is None
        resumed.open(truth.layout.hash)  # what is left of it serves; the rest comes from peers
        for block in resumed.differing(truth.hashes):
            resumed.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 1))
        assert resumed.replay(*made) == ()
    assert resumed.version == VersionId(0, 1)
    assert bits_of(resumed) == bits(truth)
    assert resumed.write_checkpoint() == VersionId(0, 1)
    shutil.rmtree(base, ignore_errors=True)
    assert bits_of(again(store, base, disk)) == bits(truth)


@CHANGES
def test_a_base_folder_that_changes_during_a_run_is_replaced_by_a_copy(store: Store, base: Path, change) -> None:
    """As at a seed, which has the bits in memory."""
    truth, model = joined(store, base, disk=False)
    assert model.replace_changed_base() is None
    commit(model, *version(store, truth, 1))
    change(base)
    assert model.replace_changed_base() == base
    assert len(copied(store)) == 1
    assert model.replace_changed_base() is None
    assert bits_of(again(store, base, disk=False)) == bits(truth)


def test_a_replica_on_a_folder_that_changes_is_damaged_and_repaired(store: Store, base: Path) -> None:
    truth, model = joined(store, base, disk=True)
    found: list[int] = []
    model.on_damage = found.append
    change_bits(base)
    assert model.replace_changed_base() == base
    assert (found, model.version) == ([2], None)
    assert model.replace_changed_base() is None
    model.open(truth.layout.hash)
    bad = model.differing(truth.hashes)
    assert len(bad) == 2
    for block in bad:
        model.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 0))
    assert model.replay(*_sealed(store)) == ()
    assert model.write_checkpoint() == VersionId(0, 0)
    assert len(copied(store)) == 1
    assert bits_of(model) == bits(truth)


def _sealed(store: Store) -> tuple[Manifest, bytes]:
    from codec import open_manifest

    seal = store.newest()
    assert seal is not None
    return open_manifest(seal.manifest, AUTHORITY.public), seal.manifest


@PLACES
def test_bits_that_a_disk_changed_silently_are_not_referred_to_again(store: Store, base: Path, disk: bool) -> None:
    truth, model = joined(store, base, disk)
    model.close()
    lie(base / "model.safetensors", 8)
    resumed = again(store, base, disk)
    while resumed.audit():
        pass
    assert resumed.version is None
    resumed.open(truth.layout.hash)
    for block in resumed.differing(truth.hashes):
        resumed.write_block(block, truth.read_block(block), truth.hashes[block].tobytes(), VersionId(0, 0))
    assert resumed.replay(*_sealed(store)) == ()
    assert resumed.write_checkpoint() == VersionId(0, 0)
    assert len(copied(store)) == 1
    assert bits_of(again(store, base, disk)) == bits(truth)


@pytest.mark.parametrize("what", ["another folder's bits", "inside the store", "a pipe"])
def test_what_cannot_be_referred_to_is_copied(store: Store, base: Path, what: str) -> None:
    truth = new_replica()
    match what:
        case "another folder's bits":
            words = {name: np.array(truth.bits(name)) for name in ("a.weight", "b.weight", "c.bias")}
            words["c.bias"][0] ^= 1
            shutil.rmtree(base)
            write_checkpoint(base, layout(), words.__getitem__, {"config.json": CONFIG})
        case "inside the store":
            base = base.rename(store.folder / "mine")
    if what == "a pipe":
        from swarm.store import Reference

        os.mkfifo(base / "pipe")
        assert Reference.of(base, [base / "pipe"]) is None
        return
    model = Model(store, base=base)
    replica = model.load_base(Checkpoint.open(base), truth.layout)
    if what == "another folder's bits":
        replica.write_block(2, truth.read_block(2), truth.hashes[2].tobytes())
    genesis(store, model, replica, AUTHORITY, files={"config.json": CONFIG})
    assert len(copied(store)) == 1


def test_a_seed_starts_from_a_folder_by_a_relative_path(
    store: Store, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    checkpoint = Checkpoint.open(base.name)
    model = Model(store, base=Path(base.name))
    genesis(store, model, model.load_base(checkpoint, checkpoint.layout), AUTHORITY, files=checkpoint.files)
    monkeypatch.chdir("/")
    assert copied(store) == []
    assert bits_of(again(store, base, disk=False)) == bits(new_replica())
