"""The store: crashes between any two writes, full disks, and damaged files."""

import errno
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runtime_kit import AUTHORITY, CONFIG, Killed, layout, new_replica, step

from codec import Chunk, ChunkKey, Manifest, Replica, open_header, seal_chunk, state_root
from codec.errors import UsageError
from swarm.protocol.core.events import VersionId
from swarm.runtime.publishing import genesis
from swarm.runtime.replica.model import Model
from swarm.store import Disk, DiskFull, Seal, Store, TwoSeals


def kill_at(count: int) -> tuple[Disk, list[str]]:
    """A disk whose process dies before its `count`-th step; it counts the steps."""
    steps: list[str] = []

    def before(step: str, path: Path) -> None:
        if len(steps) == count:
            raise Killed
        steps.append(f"{step} {path.name}")

    return Disk(before), steps


def full_after(count: int) -> Disk:
    """A disk with room for `count` writes."""
    left = count

    def before(step: str, path: Path) -> None:
        nonlocal left
        left -= step == "write"
        if left < 0 and step in ("write", "sync", "commit"):
            raise OSError(errno.ENOSPC, "No space left on device")

    return Disk(before)


def make_version(replica: Replica, number: int, attempt: int = 0) -> tuple[Manifest, bytes, list[Chunk]]:
    """The chunks and the seal of a step on `replica`, which does not change."""
    deltas = step(replica, number)
    hashes = replica.hashes.copy()
    chunks = []
    for seq, delta in enumerate(deltas):
        hashes[delta.block] = np.frombuffer(delta.new_hash, np.uint8)
        key = ChunkKey(0, number, attempt, seq)
        chunks.append(seal_chunk(key, replica.root, replica.layout.hash, [delta], AUTHORITY))
    manifest = Manifest(
        AUTHORITY.public, 0, number, attempt, replica.root, state_root(replica.layout.hash, hashes),
        replica.layout.hash, tuple(chunk.id for chunk in chunks), sum(chunk.nbytes for chunk in chunks), 1,
    )  # fmt: skip
    return manifest, manifest.seal(AUTHORITY), chunks


def put(store: Store, chunks: list[Chunk]) -> None:
    for chunk in chunks:
        header = open_header(chunk.header, AUTHORITY.public)
        store.chunks.put_header(header, chunk.header)
        for index in range(header.n_pieces):
            piece = header.piece_range(index)
            assert store.chunks.put_piece(header.key, index, chunk.body[piece.start : piece.stop])
        store.chunks.spill(header.key)


def advance(store: Store, model: Model, number: int, attempt: int = 0) -> bytes:
    """Stage, seal and scatter a version; its root."""
    assert model.replica is not None
    manifest, sealed, chunks = make_version(model.replica, number, attempt)
    put(store, chunks)
    for chunk in store.chunks.of(VersionId(0, number), attempt):
        model.stage(chunk)
    model.prepare(manifest, sealed)
    model.apply(manifest)
    return manifest.root


def life(store: Store) -> list[bytes]:
    """Run to version 4, from an empty folder or where an earlier run ended, with a checkpoint at 2; the roots."""
    model = Model(store)
    restored = model.restore()
    if restored is None:
        restored = genesis(store, model, new_replica(), AUTHORITY, files={"config.json": CONFIG})
    roots = [restored.root]
    while roots and restored.id.version + len(roots) <= 4:
        number = restored.id.version + len(roots)
        attempts = store.records.get(f"attempts/{number}")
        attempt = 0 if attempts is None else int(attempts) + 1
        store.records.put([(f"attempts/{number}", str(attempt).encode())])
        roots.append(advance(store, model, number, attempt))
        if number == 2:
            model.write_checkpoint()
    store.evict(VersionId(0, 4), 3)
    return roots


@pytest.mark.parametrize(
    ("first", "stride"), [(0, 9), *(pytest.param(first, 9, marks=pytest.mark.slow) for first in range(1, 9))]
)
def test_a_kill_between_any_two_writes_loses_nothing_sealed(tmp_path: Path, first: int, stride: int) -> None:
    with Store(tmp_path / "whole", AUTHORITY.public) as store:
        expected = life(store)
        assert [seal.root for seal in store.records.seals()] == expected
    count = first
    while True:
        folder = tmp_path / f"at{count}"
        disk, steps = kill_at(count)
        try:
            store = Store(folder, AUTHORITY.public, disk)
            life(store)
            store.close()
            break
        except Killed:
            _release(folder)
        with Store(folder, AUTHORITY.public) as store:
            sealed = [seal.root for seal in store.records.seals()]
            assert sealed == expected[: len(sealed)], steps[-1:]
            model = Model(store)
            restored = model.restore()
            assert (None if restored is None else restored.root) == (sealed[-1] if sealed else None), steps[-1:]
            if model.replica is not None:
                assert model.replica.rehash() == []
        _release(folder)
        with Store(folder, AUTHORITY.public) as store:
            life(store)
            assert [seal.root for seal in store.records.seals()] == expected, steps[-1:]
        count += stride
    assert count > 60  # steps before which the process can die


def _release(folder: Path) -> None:
    """A dead process holds no lock. Within one process, the dead store's descriptor must be closed here."""
    import fcntl
    import os

    for entry in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(entry) == str(folder / "lock"):
                fcntl.flock(int(entry.name), fcntl.LOCK_UN)
        except OSError:
            continue


def test_a_full_disk_raises_and_damages_nothing(tmp_path: Path) -> None:
    messages: list[str] = []
    for count in itertools.count(0, 5):
        folder = tmp_path / f"room{count}"
        try:
            store = Store(folder, AUTHORITY.public, full_after(count))
        except DiskFull:
            continue
        try:
            with store:
                life(store)
            break
        except DiskFull as error:
            messages.append(str(error))
        with Store(folder, AUTHORITY.public) as store:
            roots = life(store)
            assert store.newest() is not None
            assert store.newest().root == roots[-1]  # type: ignore[union-attr]
    assert len(messages) > 3
    assert all("is full" in message and str(tmp_path) in message for message in messages)


def test_two_processes_do_not_share_a_home(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public), pytest.raises(UsageError, match="Another process uses"):
        Store(tmp_path, AUTHORITY.public)
    Store(tmp_path, AUTHORITY.public).close()


def test_a_version_is_sealed_once(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public) as store:
        seal = Seal(VersionId(0, 1), 0, b"r" * 32, b"p" * 32, 0, b"manifest")
        store.seal(seal)
        store.seal(seal)
        with pytest.raises(TwoSeals, match=r"0\.1 was sealed twice"):
            store.seal(Seal(VersionId(0, 1), 1, b"R" * 32, b"p" * 32, 0, b"other"))
        assert store.records.seal(VersionId(0, 1)) == seal


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-5000], lambda b: b[:200] + bytes(1) * 60 + b[260:], lambda b: b"x" + b]
)
def test_damaged_pieces_are_ignored(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    with Store(tmp_path, AUTHORITY.public) as store:
        _, _, chunks = make_version(new_replica(), 1)
        put(store, chunks)
        held = {chunk.key: store.chunks.body(chunk.key) for chunk in store.chunks.all()}
        store.chunks.sync(VersionId(0, 1), 0)
    pack = tmp_path / "chunks" / "0.1.0"
    pack.write_bytes(spoil(pack.read_bytes()))
    with Store(tmp_path, AUTHORITY.public) as store:
        found = {chunk.key: store.chunks.body(chunk.key) for chunk in store.chunks.all()}
        assert all(body is None or body == held[key] for key, body in found.items())
        whole = [body for body in found.values() if body is not None]
        assert len(whole) < len(held)


def test_pieces_of_an_unfinished_version_are_found_again(tmp_path: Path) -> None:
    replica = new_replica()
    _, _, chunks = make_version(replica, 1)
    with Store(tmp_path, AUTHORITY.public) as store:
        put(store, chunks[:1])
        header = open_header(chunks[1].header, AUTHORITY.public)
        store.chunks.put_header(header, chunks[1].header)  # never written, so nothing of value is lost
    with Store(tmp_path, AUTHORITY.public) as store:
        (found,) = store.chunks.all()
        assert found.whole
        assert store.chunks.body(found.key) == chunks[0].body


def test_a_chunk_without_a_body_counts_once_it_is_sealed(tmp_path: Path) -> None:
    """Of a chunk that changes nothing which is held here, the header is kept. Before its seal it may be lost."""
    replica = new_replica()
    manifest, sealed, chunks = make_version(replica, 1)
    seal = Seal.of(manifest, sealed)
    with Store(tmp_path, AUTHORITY.public) as store:
        put(store, chunks[1:])
        header = open_header(chunks[0].header, AUTHORITY.public)
        store.chunks.put_header(header, chunks[0].header, bodiless=True)
        assert not store.chunks.put_piece(header.key, 0, chunks[0].body[: len(header.piece_range(0))])
        assert store.whole(seal)
    with Store(tmp_path, AUTHORITY.public) as store:
        assert not store.whole(seal)
        store.chunks.put_header(header, chunks[0].header, bodiless=True)
        store.seal(seal)
        store.seal(seal)  # again: it is written once
    with Store(tmp_path, AUTHORITY.public) as store:
        assert store.whole(seal)
        found = store.chunks.chunk(header.key)
        assert found is not None
        assert (found.bodiless, found.whole, found.have) == (True, False, 0)
        assert store.chunks.payload(header.key, header.blocks[0].block) is None
        assert all(chunk.whole for chunk in store.chunks.all() if chunk.key != header.key)


def test_a_body_that_is_needed_after_all_is_stored(tmp_path: Path) -> None:
    """What a damaged disk says of bodies is not signed: a member that needs one takes it, also over a restart."""
    manifest, sealed, chunks = make_version(new_replica(), 1)
    with Store(tmp_path, AUTHORITY.public) as store:
        put(store, chunks[1:])
        header = open_header(chunks[0].header, AUTHORITY.public)
        store.chunks.put_header(header, chunks[0].header, bodiless=True)
        store.seal(Seal.of(manifest, sealed))
        store.chunks.expect_body(header.key)
        assert not store.whole(Seal.of(manifest, sealed))
        put(store, chunks[:1])
        assert store.chunks.body(header.key) == chunks[0].body
    with Store(tmp_path, AUTHORITY.public) as store:
        assert store.chunks.body(header.key) == chunks[0].body
        assert store.whole(Seal.of(manifest, sealed))
        assert [store.chunks.body(chunk.opened.key) for chunk in chunks if chunk.opened] == [c.body for c in chunks]


def test_memory_is_counted_and_spilled(tmp_path: Path) -> None:
    _, _, chunks = make_version(new_replica(), 1)
    with Store(tmp_path, AUTHORITY.public) as store:
        header = open_header(chunks[0].header, AUTHORITY.public)
        store.chunks.put_header(header, chunks[0].header)
        store.chunks.put_piece(header.key, 0, chunks[0].body[: len(header.piece_range(0))])
        assert store.chunks.memory_bytes == len(header.piece_range(0))
        assert store.chunks.piece(header.key, 0) == chunks[0].body[: len(header.piece_range(0))]
        store.chunks.spill_all()
        assert store.chunks.memory_bytes == 0
        assert store.chunks.piece(header.key, 0) == chunks[0].body[: len(header.piece_range(0))]
        store.chunks.drop(VersionId(0, 1))
        assert store.chunks.piece(header.key, 0) is None
        assert store.chunks.was_dropped(header.key)
        assert not list((tmp_path / "chunks").iterdir())


@pytest.mark.parametrize("wanted", [False, True])
def test_a_chunk_is_written_once_by_concurrent_spills(tmp_path: Path, wanted: bool) -> None:
    _, _, chunks = make_version(new_replica(), 1)
    with Store(tmp_path, AUTHORITY.public) as store:
        for chunk in chunks:
            header = open_header(chunk.header, AUTHORITY.public)
            store.chunks.put_header(header, chunk.header)
            for index in range(header.n_pieces):
                piece = header.piece_range(index)
                store.chunks.put_piece(header.key, index, chunk.body[piece.start : piece.stop])
            store.chunks.spill(header.key, header.key, wanted=wanted)
            store.chunks.spill_all()
        assert store.chunks.memory_bytes == 0
        assert [store.chunks.body(chunk.key) for chunk in store.chunks.all()] == [chunk.body for chunk in chunks]
        store.chunks.sync(VersionId(0, 1), 0)
        size = (tmp_path / "chunks" / "0.1.0").stat().st_size
        assert size <= sum(len(chunk.header) + len(chunk.body) + 16 + 4096 for chunk in chunks)
    with Store(tmp_path, AUTHORITY.public) as store:
        assert [store.chunks.body(chunk.key) for chunk in store.chunks.all()] == [chunk.body for chunk in chunks]


def put_whole(store: Store, chunk: Chunk) -> ChunkKey:
    header = open_header(chunk.header, AUTHORITY.public)
    store.chunks.put_header(header, chunk.header)
    for index in range(header.n_pieces):
        piece = header.piece_range(index)
        store.chunks.put_piece(header.key, index, memoryview(chunk.body)[piece.start : piece.stop])
    return header.key


def test_written_chunks_may_stay_in_memory(tmp_path: Path) -> None:
    """They are written once, read from memory, and the longest written are released first."""
    writes: list[str] = []
    _, _, chunks = make_version(new_replica(), 1)
    with Store(tmp_path, AUTHORITY.public, Disk(lambda step, path: writes.append(step))) as store:
        keys = [put_whole(store, chunk) for chunk in chunks]
        sizes = [len(chunk.body) for chunk in chunks]
        store.chunks.spill(*keys, keep=True)
        assert store.chunks.memory_bytes == store.chunks.written_bytes == sum(sizes)
        n_writes = writes.count("write")
        store.chunks.spill(*keys)
        store.chunks.sync(VersionId(0, 1), 0)
        assert writes.count("write") == n_writes
        store.chunks.release_written(sum(sizes) - 1)
        assert store.chunks.memory_bytes == store.chunks.written_bytes == sum(sizes[1:])
        assert not store.chunks.chunk(keys[0]).memory
        assert [store.chunks.body(key) for key in keys] == [chunk.body for chunk in chunks]
        store.chunks.spill_all()
        assert store.chunks.memory_bytes == store.chunks.written_bytes == 0
        assert [store.chunks.body(key) for key in keys] == [chunk.body for chunk in chunks]


def test_a_kept_chunk_that_is_dropped_is_subtracted(tmp_path: Path) -> None:
    _, _, chunks = make_version(new_replica(), 1)
    with Store(tmp_path, AUTHORITY.public) as store:
        store.chunks.spill(*(put_whole(store, chunk) for chunk in chunks), keep=True)
        store.chunks.drop(VersionId(0, 1))
        assert store.chunks.memory_bytes == store.chunks.written_bytes == 0
        store.chunks.release_written(0)


def test_a_chunk_dropped_while_it_is_written_is_subtracted_once(tmp_path: Path) -> None:
    _, _, chunks = make_version(new_replica(), 1)
    header = open_header(chunks[0].header, AUTHORITY.public)
    droppers: list[threading.Thread] = []

    def before(step: str, path: Path) -> None:
        if step == "write" and path.exists() and path.name == "0.1.0" and not droppers:
            droppers.append(threading.Thread(target=store.chunks.drop, args=(VersionId(0, 1),)))
            droppers[0].start()
            while store.chunks.chunk(header.key) is not None:
                time.sleep(0.001)

    with Store(tmp_path, AUTHORITY.public, Disk(before)) as store:
        store.chunks.put_header(header, chunks[0].header)
        store.chunks.put_piece(header.key, 0, chunks[0].body[: len(header.piece_range(0))])
        store.chunks.spill_all()
        droppers[0].join()
        assert store.chunks.memory_bytes == 0


def test_a_changed_checkpoint_is_hashed_and_a_wrong_one_is_not_used(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public) as store:
        life(store)
        (checkpoint,) = store.checkpoints.list()
        assert checkpoint.trusted
        weights = next(checkpoint.folder.glob("*.safetensors"))
        data = bytearray(weights.read_bytes())
        data[-3] ^= 1
        weights.write_bytes(data)
    with Store(tmp_path, AUTHORITY.public) as store:
        assert not store.checkpoints.list()[0].trusted
        model = Model(store)
        assert model.restore() is None  # wrong bits are never called a version
        assert store.checkpoints.list() == []


def test_evict_keeps_what_a_restart_needs(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public) as store:
        roots = life(store)  # keeps 3, with the checkpoint at 2
        assert {chunk.key.version for chunk in store.chunks.all()} == {2, 3, 4}
        store.evict(VersionId(0, 4), 1)
        assert {chunk.key.version for chunk in store.chunks.all()} == {3, 4}
        assert store.hashes(roots[4]) is not None
        assert store.hashes(roots[1]) is None
        assert [seal.id.version for seal in store.recover().replay] == [3, 4]


def test_evict_keeps_a_hash_list_that_is_being_written(tmp_path: Path) -> None:
    """An eviction after version 4 runs at each step of writing the hash list of version 5."""
    with Store(tmp_path, AUTHORITY.public) as store:
        life(store)
        met = list[str]()

        def meet(step: str, path: Path) -> None:
            if path.parent.name == "hashes" and step != "remove":
                met.append(step)
                store.evict(VersionId(0, 4), 3)

        store.disk.before = meet
        hashes = np.arange(64, dtype=np.uint8).reshape(2, 32)
        store.put_hashes(b"5" * 32, hashes)
        store.evict(VersionId(0, 4), 3)
        assert {"write", "sync", "rename"} <= set(met)
        assert np.array_equal(store.hashes(b"5" * 32), hashes), "its seal may still come"
    with Store(tmp_path, AUTHORITY.public) as store:
        store.evict(VersionId(0, 4), 3)
        assert store.hashes(b"5" * 32) is None, "after a restart its seal cannot come"


def test_a_restart_ends_at_a_rollback(tmp_path: Path) -> None:
    """4 versions, a checkpoint at 2, then rollbacks to 2 and to 1 in new epochs: old roots under new versions."""

    def publish_rollback(store: Store, to: Seal, epoch: int) -> Seal:
        newest = store.newest()
        assert newest is not None
        manifest = Manifest(
            AUTHORITY.public, epoch, to.id.version, 0, newest.root, to.root, bytes(32), (), 0, 0,
        )  # fmt: skip
        seal = Seal.of(manifest, manifest.seal(AUTHORITY))
        store.seal(seal)
        return seal

    with Store(tmp_path, AUTHORITY.public) as store:
        roots = life(store)
        two = store.records.seal(VersionId(0, 2))
        assert two is not None
        back = publish_rollback(store, two, 1)
        recovery = store.recover()
        assert [seal.id for seal in recovery.replay] == [VersionId(0, 3), VersionId(0, 4), VersionId(1, 2)]
        assert store.newest() == back
        assert store.chain(roots[2], back.id) == (), "no older version leads from it"
        three = store.records.seal(VersionId(0, 3))
        assert three is not None
        publish_rollback(store, three, 2)
        assert [seal.id for seal in store.chain(roots[2], back.id)] == [VersionId(2, 3)]


def test_a_seed_keeps_two_checkpoints(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public, checkpoints_kept=2) as store:
        model = Model(store)
        genesis(store, model, new_replica(), AUTHORITY, files={"config.json": CONFIG})
        for number in (1, 2, 3):
            advance(store, model, number)
            model.write_checkpoint()
        assert [checkpoint.version for checkpoint in store.checkpoints.list()] == [VersionId(0, 3), VersionId(0, 2)]


def test_files_have_the_hashes_of_their_names(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public) as store:
        name = store.put_file(b"hello")
        assert store.file(name) == b"hello"
        (tmp_path / "files" / name.hex()).write_bytes(b"hullo")
        assert store.file(name) is None
        assert store.file(b"0" * 32) is None


def test_fetched_blocks_outlive_a_kill(tmp_path: Path) -> None:
    model_layout, replica = layout(), new_replica()
    with Store(tmp_path, AUTHORITY.public) as store:
        store.partial.add(model_layout, 1, *replica.read(1))
    with Store(tmp_path, AUTHORITY.public) as store:
        assert list(store.partial.load(model_layout)) == [(1, *replica.read(1))]
        store.partial.add(model_layout, 0, *replica.read(0))
        assert [block for block, *_ in store.partial.load(model_layout)] == [0, 1]
        store.partial.clear()
        assert list(store.partial.load(model_layout)) == []


def test_records_survive_and_the_newest_wins(tmp_path: Path) -> None:
    with Store(tmp_path, AUTHORITY.public) as store:
        store.records.put([("grant/1", b"a"), ("grant/2", b"b"), ("grant/1", b"c")])
    with Store(tmp_path, AUTHORITY.public) as store:
        assert store.records.all("grant/") == {"grant/1": b"c", "grant/2": b"b"}
        assert store.records.get("grant/1") == b"c"


def test_a_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "swarm.sqlite").write_bytes(b"not a database at all" * 100)
    with pytest.raises(UsageError, match="cannot be read"):
        Store(tmp_path, AUTHORITY.public)


def test_old_seals_are_dropped_but_not_the_first_and_not_those_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.store.home.SEALS_KEPT", 4)
    monkeypatch.setattr("swarm.store.home._SEALS_AT_ONCE", 3)
    with Store(tmp_path, AUTHORITY.public) as store:
        model = Model(store)
        genesis(store, model, new_replica(), AUTHORITY, files={"config.json": CONFIG})
        roots = [store.records.seals()[0].root]
        for number in range(1, 12):
            roots.append(advance(store, model, number))
            store.evict(VersionId(0, number), 3)
        assert len(store.records.seals()) == 12, "they lead from the only checkpoint to the newest version"
        model.write_checkpoint()
        store.evict(VersionId(0, 11), 3)
        assert [seal.id.version for seal in store.records.seals()] == [0, 8, 9, 10, 11]
    with Store(tmp_path, AUTHORITY.public) as store:
        model = Model(store)
        restored = model.restore()
        assert restored is not None
        assert restored.root == roots[11]
        advance(store, model, 12)
