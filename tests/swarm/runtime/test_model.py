"""Replaying, repairing and serving: the version that the model reports, and the bits that it has."""

import threading
from pathlib import Path

import numpy as np
import pytest
from runtime_kit import AUTHORITY, new_replica, step

from codec import (
    BlockDelta,
    ChunkKey,
    Manifest,
    Replica,
    StagedBlock,
    Torn,
    open_header,
    seal_chunk,
    state_root,
    values,
)
from codec.chunk import CODER_RAW
from codec.staging import block_hash
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.model import Model
from swarm.runtime.replica.own import BELIEVED, PROVEN, OwnChunk
from swarm.runtime.replica.replay import Mismatch
from swarm.store import Store, TwoSeals


def version(store: Store, replica: Replica, number: int, seed: int | None = None) -> tuple[Manifest, bytes]:
    """A step on `replica`, in the store and in `replica`; its manifest and seal."""
    deltas = step(replica, number if seed is None else seed)
    hashes = replica.hashes.copy()
    ids, payload, staged = [], 0, []
    for seq, delta in enumerate(deltas):
        hashes[delta.block] = np.frombuffer(delta.new_hash, np.uint8)
        chunk = seal_chunk(ChunkKey(0, number, 0, seq), replica.root, replica.layout.hash, [delta], AUTHORITY)
        header = open_header(chunk.header, AUTHORITY.public)
        store.chunks.put_header(header, chunk.header)
        for index in range(header.n_pieces):
            piece = header.piece_range(index)
            store.chunks.put_piece(header.key, index, chunk.body[piece.start : piece.stop])
        ids.append(chunk.id)
        payload += chunk.nbytes
        staged.append(replica.stage(header, chunk.body))
    manifest = Manifest(
        AUTHORITY.public, 0, number, 0, replica.root, state_root(replica.layout.hash, hashes),
        replica.layout.hash, tuple(ids), payload, 1,
    )  # fmt: skip
    replica.scatter(staged)
    assert replica.root == manifest.root
    return manifest, manifest.seal(AUTHORITY)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path, AUTHORITY.public) as opened:
        yield opened


def test_blocks_of_different_versions_are_replayed_to_one(store: Store) -> None:
    truth = new_replica()
    model = Model(store)
    model.replica = Replica.create(truth.layout)
    made = {}
    blocks = {block: (0, truth.read_block(block), truth.hashes[block].tobytes()) for block in (0, 2)}
    for number in (1, 2, 3):
        made[number] = version(store, truth, number)
        if number == 2:
            blocks[1] = (2, truth.read_block(1), truth.hashes[1].tobytes())
    for block, (label, data, digest) in blocks.items():
        model.write_block(block, data, digest, VersionId(0, label))
    assert model.read_block(0) is None  # a mix of versions is never given
    assert model.replay(*made[1]) == ()
    assert model.version is None  # block 1 is of version 2 already
    assert model.replay(*made[2]) == ()
    assert model.version == VersionId(0, 2)
    assert model.replica.root == made[2][0].root
    assert model.replay(*made[3]) == ()
    assert model.replica.root == truth.root
    assert model.replica.rehash() == []
    assert store.newest() is not None
    assert store.newest().id == VersionId(0, 3)  # type: ignore[union-attr]


def test_a_block_with_a_false_label_is_found_by_the_root(store: Store) -> None:
    truth = new_replica()
    model = Model(store)
    model.replica = Replica.create(truth.layout)
    old = [(truth.read_block(b), truth.hashes[b].tobytes()) for b in range(3)]
    first = version(store, truth, 1)
    for block, (data, digest) in enumerate(old):
        label = VersionId(0, 1) if block == 1 else VersionId(0, 0)  # the label of block 1 is too new
        model.write_block(block, data, digest, label)
    store.put_hashes(first[0].root, truth.hashes)
    assert model.replay(*first) == ()  # its label is not newer, so its chunk is applied
    assert model.replica.root == first[0].root


def test_damage_in_memory_is_detected_and_its_block_reported(store: Store) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    assert model.replica is not None
    model.replica._writable(1)[7] ^= 1
    manifest, _ = version(store, truth, 1)
    assert model.differing(new_replica().hashes) == ()  # not hashed yet
    first, second = store.chunks.of(VersionId(0, manifest.version))
    model.stage(first)
    with pytest.raises(Torn) as caught:
        model.stage(second)
    assert caught.value.blocks == (1,)
    assert model.differing(new_replica().hashes) == (1,)
    assert model.read_block(0) is None


def test_chunks_that_lead_to_another_root_are_not_applied(store: Store) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    assert model.replica is not None
    before = model.replica.root
    manifest, _ = version(store, truth, 1)
    false = Manifest(*[getattr(manifest, f) if f != "root" else b"r" * 32 for f in Manifest.__dataclass_fields__])
    with pytest.raises(Mismatch, match="do not lead to the root"):
        model.prepare(false, false.seal(AUTHORITY))
    assert model.replica.root == before
    assert store.newest() is None


def test_a_second_seal_of_a_version_is_refused_before_anything_is_written(store: Store) -> None:
    truth, other, model = new_replica(), new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    assert model.replica is not None
    first = version(store, truth, 1)
    model.prepare(*first)
    store.chunks.drop(VersionId(0, 1))
    second = version(store, other, 1, seed=77)
    with pytest.raises(TwoSeals):
        model.prepare(*second)
    assert model.replica.root == new_replica().root


@pytest.mark.parametrize("stage_bytes", [0, 3_000, 1 << 30])
def test_chunks_that_do_not_fit_in_scratch_are_decoded_at_the_seal(store: Store, stage_bytes: int) -> None:
    truth, model = new_replica(), Model(store, stage_bytes=stage_bytes)
    model.adopt(new_replica(), VersionId(0, 0))
    manifest, sealed = version(store, truth, 1)
    for chunk in store.chunks.of(VersionId(0, 1)):
        model.stage(chunk)
    model.prepare(manifest, sealed)
    changes = model.apply(manifest)
    assert (changes is not None) == (stage_bytes == 1 << 30)
    assert model.replica is not None
    assert model.replica.root == truth.root
    assert model.replica.rehash() == []
    assert model._scratch.nbytes == 0


def test_a_block_read_during_a_commit_has_the_hash_of_its_label(store: Store) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    expected = {VersionId(0, 0): truth.hashes.copy()}
    made = []
    for number in range(1, 9):
        made.append(version(store, truth, number))
        expected[VersionId(0, number)] = truth.hashes.copy()
    wrong: list[VersionId] = []
    seen: set[VersionId] = set()
    stop = threading.Event()

    def look() -> None:
        from codec.staging import block_hash

        while not stop.is_set():
            for block in range(2):
                found = model.read_block(block)
                assert found is not None
                label, data = found
                seen.add(label)
                if block_hash(np.frombuffer(data, np.uint16)) != expected[label][block].tobytes():
                    wrong.append(label)

    reader = threading.Thread(target=look)
    reader.start()
    for manifest, sealed in made:
        for chunk in store.chunks.of(VersionId(0, manifest.version)):
            model.stage(chunk)
        model.prepare(manifest, sealed)
        model.apply(manifest)
    stop.set()
    reader.join()
    assert wrong == []
    assert len(seen) > 1


def test_a_version_waits_until_a_reader_of_the_whole_replica_is_done(store: Store) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    old, (manifest, sealed) = truth.root, version(store, truth, 1)
    for chunk in store.chunks.of(VersionId(0, 1)):
        model.stage(chunk)
    model.prepare(manifest, sealed)
    writer = threading.Thread(target=model.apply, args=(manifest,))

    def use(replica: Replica) -> list[int]:
        writer.start()
        writer.join(0.1)
        assert writer.is_alive()
        assert replica.root == old
        return replica.rehash()

    assert model.read(use) == []  # no bits of the waiting version
    writer.join(10)
    assert not writer.is_alive()
    assert model.replica is not None
    assert model.replica.root == manifest.root


def test_a_checkpoint_gives_way_to_a_version_that_has_waited_long(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    manifest, sealed = version(store, truth, 1)
    for chunk in store.chunks.of(VersionId(0, 1)):
        model.stage(chunk)
    model.prepare(manifest, sealed)
    writer = threading.Thread(target=model.apply, args=(manifest,))
    monkeypatch.setattr("swarm.runtime.replica.write_gate.CHECKPOINT_S", 0.05)

    def slow_disk(folder: Path, *, layout, bits, files, write_file) -> None:
        folder.mkdir()
        bits(layout.tensors[0].name)
        writer.start()
        writer.join(0.2)
        bits(layout.tensors[1].name)

    monkeypatch.setattr("swarm.runtime.replica.files.write_checkpoint", slow_disk)
    assert model.write_checkpoint() is None
    writer.join(10)
    assert not writer.is_alive()
    assert (model.version, store.checkpoints.list()) == (VersionId(0, 1), [])
    monkeypatch.undo()
    assert model.write_checkpoint() == VersionId(0, 1)


def own_version(
    store: Store, model: Model, truth: Replica, number: int, *, raw: str = "", wrong: bool = False
) -> tuple[Manifest, bytes]:
    """A step as the seed's own publisher hands it over: stored chunks, and the list of what each changes.

    `raw`: "bits": block 0 is sent whole; "values": half of it changes, and is sent as new values. `wrong`: the list of
    block 0 has a wrong bit.
    """
    before = [truth.block(block).copy() for block in range(truth.layout.n_blocks)]
    manifest, sealed = version(store, truth, number) if not raw else raw_version(store, truth, number, raw)
    for chunk in store.chunks.of(VersionId(0, number)):
        blocks = []
        for entry in chunk.header.blocks:
            if entry.coder == CODER_RAW:
                continue
            new = truth.block(entry.block)
            positions = np.flatnonzero(before[entry.block] != new).astype(np.uint32)
            bits = new[positions]
            if wrong and entry.block == 0:
                bits[0] ^= 1
            old_hash = block_hash(before[entry.block])
            blocks.append(StagedBlock(entry.block, positions, bits, old_hash, entry.new_hash))
        model.stage_own(chunk, OwnChunk(tuple(blocks)))
    return manifest, sealed


def raw_version(store: Store, truth: Replica, number: int, how: str) -> tuple[Manifest, bytes]:
    """A version in which block 0 changes, and is sent raw: see `own_version`."""
    old, spec = truth.block(0), truth.layout.block(0)
    new = old + np.ones((), old.dtype)
    payload: bytes | None = new.tobytes()
    if how == "values":
        new[: old.size // 2] = old[: old.size // 2]
        payload = values.encode_block(old, new, spec.dtype)
    assert payload is not None
    assert (len(payload) < spec.nbytes) == (how == "values")
    delta = BlockDelta(0, CODER_RAW, block_hash(new), payload)
    chunk = seal_chunk(ChunkKey(0, number, 0, 0), truth.root, truth.layout.hash, [delta], AUTHORITY)
    header = open_header(chunk.header, AUTHORITY.public)
    store.chunks.put_header(header, chunk.header)
    for index in range(header.n_pieces):
        piece = header.piece_range(index)
        store.chunks.put_piece(header.key, index, chunk.body[piece.start : piece.stop])
    parent = truth.root
    truth.write_block(0, new.tobytes(), delta.new_hash)
    manifest = Manifest(
        AUTHORITY.public, 0, number, 0, parent, truth.root, truth.layout.hash, (chunk.id,), chunk.nbytes, 1
    )
    return manifest, manifest.seal(AUTHORITY)


@pytest.mark.parametrize("raw", ["", "bits", "values"])
def test_what_the_seed_encoded_is_written_undecoded_and_hashed_before_it_is_given(store: Store, raw: str) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    manifest, sealed = own_version(store, model, truth, 1, raw=raw)
    for chunk in store.chunks.of(VersionId(0, 1)):
        model.stage(chunk)  # finds it there
    model.prepare(manifest, sealed)
    assert model.apply(manifest) is None
    assert model.replica is not None
    assert model.replica.root == truth.root == manifest.root
    assert model._unproven.any()
    assert model.read_block(0) == (VersionId(0, 1), truth.read_block(0))
    assert model._unproven[0] == PROVEN
    assert model.write_checkpoint() == VersionId(0, 1)
    assert not model._unproven.any()
    assert model.replica.rehash() == []
    assert model._scratch.nbytes == 0


def test_a_wrong_bit_in_the_seeds_own_list_is_never_given_and_never_saved(store: Store) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    damaged: list[int] = []
    model.on_damage = damaged.append
    model.prepare(*(made := own_version(store, model, truth, 1, wrong=True)))
    model.apply(made[0])
    assert model.read_block(1) == (VersionId(0, 1), truth.read_block(1))
    assert model.write_checkpoint() is None
    assert damaged == [1]
    assert model.version is None
    assert model.read_block(0) is None


def test_an_own_change_does_not_prove_what_a_clean_start_believed(store: Store) -> None:
    truth, model = new_replica(), Model(store)
    model.adopt(new_replica(), VersionId(0, 0))
    model._unproven[:] = BELIEVED
    model.prepare(*(made := own_version(store, model, truth, 1)))
    model.apply(made[0])
    assert (model._unproven == BELIEVED).all()
    while model.audit():
        pass
    assert not model._unproven.any()
