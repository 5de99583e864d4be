"""The replica: staged changes are verified before any write, and a reader never gets a mix of two versions."""

import mmap
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from codec_kit import KEY, LAYOUT, block_of, differing, hash_of, opened, publish, replica_of, stepped, weights

from codec.checkpoint import Checkpoint, write_checkpoint
from codec.chunk import CODER_PCO, CODER_RAW, CODER_RICE, BlockDelta, ChunkKey, seal_chunk
from codec.errors import PeerError, UsageError
from codec.layout import Layout, TensorSpec
from codec.manifest import Manifest, state_root
from codec.replica import Replica
from codec.staging import Torn

OLD = weights()
NEW = stepped(OLD)


@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO, CODER_RAW])
def test_a_step_is_staged_and_scattered(coder: int) -> None:
    replica = replica_of(OLD)
    before = replica.root
    staged = [replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, NEW, coder)]
    assert replica.root == before
    assert differing(replica, OLD) == []  # nothing is written before the seal
    expected = replica.predicted_root(staged)
    replica.scatter(staged)
    assert differing(replica, NEW) == []
    assert replica.root == expected == replica_of(NEW).root
    assert replica.rehash() == []
    assert sum(part.changed for part in staged) == sum(int((OLD[n] != NEW[n]).sum()) for n in OLD)
    assert all(part.nbytes > 6 * part.changed for part in staged)


def test_chunks_may_arrive_in_any_order_and_repeatedly() -> None:
    replica = replica_of(OLD)
    chunks = publish(replica, NEW, target_bytes=200)
    assert len(chunks) > 2
    staged = [replica.stage(opened(chunk), chunk.body) for chunk in chunks[::-1]]
    replica.scatter(staged[:1])
    replica.scatter(staged)
    replica.scatter(staged)
    assert differing(replica, NEW) == []
    for chunk in chunks:  # replayed after the seal: every block has its new hash already
        assert replica.stage(opened(chunk), chunk.body).blocks == ()


def test_steps_follow_one_another() -> None:
    replica = replica_of(OLD)
    bits = OLD
    for step in range(4):
        bits = stepped(bits, 0.002, seed=step)
        replica.scatter([replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, bits)])
        assert differing(replica, bits) == []


def test_one_delta_over_many_steps() -> None:
    bits = OLD
    for step in range(8):
        bits = stepped(bits, 0.01, seed=step)
    replica = replica_of(OLD)
    replica.scatter([replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, bits)])
    assert differing(replica, bits) == []


def test_torn_blocks_are_named_and_nothing_is_written() -> None:
    replica = replica_of(OLD)
    chunks = publish(replica, NEW)
    torn = LAYOUT.blocks_of("b.weight")[0]
    other = block_of(stepped(OLD, 0.5, seed=9), LAYOUT, torn)
    replica.write_block(torn, other.tobytes(), hash_of(other))
    named: list[int] = []
    text = ""
    staged = []
    for chunk in chunks:
        try:
            staged.append(replica.stage(opened(chunk), chunk.body))
        except Torn as error:
            named += error.blocks
            text = str(error)
    assert str(torn) in text
    assert named == [torn]
    new = block_of(NEW, LAYOUT, torn)
    replica.write_block(torn, new.tobytes(), hash_of(new))  # fetched whole from a peer
    staged += [replica.stage(opened(chunk), chunk.body) for chunk in chunks]
    replica.scatter(staged)
    assert differing(replica, NEW) == []


def test_blocks_that_changed_after_staging_are_not_scattered_into() -> None:
    replica = replica_of(OLD)
    staged = [replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, NEW)]
    other = block_of(stepped(OLD, 0.5, seed=9), LAYOUT, 0)
    replica.write_block(0, other.tobytes(), hash_of(other))
    with pytest.raises(Torn) as error:
        replica.scatter(staged)
    assert error.value.blocks == (0,)
    assert differing(replica, OLD) == ["a.bias"]


def test_a_crash_during_scatter_is_detected_and_repaired() -> None:
    """After a crash some blocks are new, one is torn, the others old: replay the chunks, fetch the torn block."""
    replica = replica_of(OLD)
    chunks = publish(replica, NEW, target_bytes=200)
    staged = [replica.stage(opened(chunk), chunk.body) for chunk in chunks]
    replica.scatter(staged[:1])
    torn = staged[-1].blocks[-1]

    def crash() -> None:
        with replica._writing(torn.block, torn.new_hash) as words:
            words[torn.positions[:1]] = torn.bits[:1]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        crash()
    assert replica.hashes[torn.block].tobytes() == bytes(32)
    crashed = Replica.attach(os.dup(replica.seal_for_readers()), LAYOUT, replica.hashes.copy())
    assert torn.block in crashed.rehash() or torn.positions.size == 1
    replica.rehash()
    mended = []
    for chunk in chunks:
        try:
            mended.append(replica.stage(opened(chunk), chunk.body))
        except Torn as error:
            for block in error.blocks:
                new = block_of(NEW, LAYOUT, block)
                replica.write_block(block, new.tobytes(), hash_of(new))
            mended.append(replica.stage(opened(chunk), chunk.body))
    replica.scatter(mended)
    assert differing(replica, NEW) == []
    assert replica.root == replica_of(NEW).root


def test_a_chunk_of_another_model() -> None:
    other = replica_of(OLD, Layout((*LAYOUT.tensors[:-1], TensorSpec("model.embed_tokens.weight", "BF16", (70, 64)))))
    chunk = publish(other, NEW)[0]
    with pytest.raises(PeerError, match="layout hash"):
        replica_of(OLD).stage(opened(chunk), chunk.body)


def test_a_block_beyond_the_model() -> None:
    replica = replica_of(OLD)
    delta = BlockDelta(LAYOUT.n_blocks, CODER_RAW, bytes(32), b"xx")
    chunk = seal_chunk(ChunkKey(0, 1, 0, 0), replica.root, LAYOUT.hash, [delta], KEY)
    with pytest.raises(PeerError, match=r"chunk\.block"):
        replica.stage(opened(chunk), chunk.body)


@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO, CODER_RAW])
def test_a_payload_with_a_wrong_result_raises_torn(coder: int) -> None:
    """A signed chunk that is wrong (a bug of the trainer, or another parent) is not written."""
    replica = replica_of(OLD)
    good = replica.encode_block(0, block_of(NEW, LAYOUT, 0), coder)
    assert good is not None
    for payload, digest in ((good.payload, bytes(32)), (good.payload[:-1], good.new_hash), (b"x", good.new_hash)):
        delta = BlockDelta(0, good.coder, digest, payload)
        chunk = seal_chunk(ChunkKey(0, 1, 0, 0), replica.root, LAYOUT.hash, [delta], KEY)
        with pytest.raises(Torn):
            replica.stage(opened(chunk), chunk.body)
    assert differing(replica, OLD) == []


def test_dense_blocks_are_sent_raw() -> None:
    replica = replica_of(OLD)
    rng = np.random.default_rng(5)
    block = LAYOUT.blocks_of("b.weight")[1]
    new = rng.integers(0, 1 << 16, LAYOUT.block(block).count).astype(np.uint16)
    for coder in (CODER_RICE, CODER_PCO):
        delta = replica.encode_block(block, new, coder)
        assert delta is not None
        assert delta.coder == CODER_RAW
        assert delta.payload == new.tobytes()
    chunk = seal_chunk(ChunkKey(0, 1, 0, 0), replica.root, LAYOUT.hash, [delta], KEY)
    assert chunk.nbytes < 1.01 * new.nbytes
    replica.scatter([replica.stage(opened(chunk), chunk.body)])
    assert np.array_equal(replica.block(block), new)


@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I64"])
def test_a_wholly_rewritten_tensor_costs_at_most_a_percent_more_than_its_bytes(dtype: str, coder: int) -> None:
    """Counts all bytes on the wire, the seal included."""
    layout = Layout((TensorSpec("w", dtype, (1_500_000,)),))
    replica, after = replica_of(weights(layout, 1), layout), {}
    after["w"] = np.random.default_rng(2).integers(0, 256, layout.nbytes, np.uint8).view(layout.tensor("w").type.bits)
    after["w"] = after["w"][:1_500_000]
    chunks = publish(replica, after, coder)
    staged = [replica.stage(opened(chunk), chunk.body) for chunk in chunks]
    payload, ids = sum(chunk.nbytes for chunk in chunks), tuple(chunk.id for chunk in chunks)
    root = replica.predicted_root(staged)
    seal = Manifest(KEY.public, 0, 1, 0, replica.root, root, layout.hash, ids, payload, 1_500_000).seal(KEY)
    assert payload + len(seal) <= 1.01 * layout.full_bytes
    replica.scatter(staged)
    assert differing(replica, after) == []


def test_unchanged_blocks_are_not_encoded() -> None:
    replica = replica_of(OLD)
    assert all(replica.encode_block(i, block_of(OLD, LAYOUT, i)) is None for i in range(LAYOUT.n_blocks))
    assert replica.stage(opened(publish(replica, NEW)[0]), publish(replica, NEW)[0].body).changed > 0
    replica.scatter([])
    assert differing(replica, OLD) == []


def test_write_block_checks_length_and_hash() -> None:
    replica = replica_of(OLD)
    data = block_of(NEW, LAYOUT, 0).tobytes()
    with pytest.raises(PeerError, match=r"block\.hash"):
        replica.write_block(0, data, bytes(32))
    with pytest.raises(PeerError, match=r"block\.length"):
        replica.write_block(0, data[:-1], hash_of(block_of(NEW, LAYOUT, 0)))
    assert differing(replica, OLD) == []
    with pytest.raises(IndexError):
        replica.read_block(LAYOUT.n_blocks)


def test_views_cannot_be_written() -> None:
    replica = replica_of(OLD)
    for view in (replica.bits("a.bias"), replica.block(0)):
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert replica.bits("c.empty").size == 0
    assert np.array_equal(replica.bits("lm_head.weight"), OLD["model.embed_tokens.weight"])


def test_a_new_replica_has_no_version() -> None:
    replica = Replica.create(LAYOUT)
    assert not replica.hashes.any()
    assert replica.root == state_root(LAYOUT.hash, np.zeros((LAYOUT.n_blocks, 32), np.uint8))
    assert replica.rehash() == list(range(LAYOUT.n_blocks))


def test_from_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", LAYOUT, OLD.__getitem__, {"config.json": b'{"tie_word_embeddings": true}'})
    checkpoint = Checkpoint.open(tmp_path / "m")
    replica = Replica.from_checkpoint(checkpoint)
    assert replica.layout == checkpoint.layout
    assert differing(replica, OLD) == []
    assert replica.rehash() == []


def test_from_a_checkpoint_that_matches_in_part(tmp_path: Path) -> None:
    """Tensors that match are copied; the others have no version and are fetched from peers."""
    layout = Layout((*LAYOUT.tensors[:2], TensorSpec("e.fp8", "F8_E5M2", (129,)), LAYOUT.tensors[-1]))
    write_checkpoint(tmp_path / "m", layout, OLD.__getitem__, {})
    replica = Replica.from_checkpoint(Checkpoint.open(tmp_path / "m"), LAYOUT)
    assert differing(replica, OLD) == ["d.scalar", "e.fp8", "f.steps"]
    without = {LAYOUT.block(i).name for i in range(LAYOUT.n_blocks) if not replica.hashes[i].any()}
    assert without == {"d.scalar", "e.fp8", "f.steps"}


def test_from_a_checkpoint_of_another_model(tmp_path: Path) -> None:
    layout = Layout((TensorSpec("other", "BF16", (3,)),))
    write_checkpoint(tmp_path / "m", layout, weights(layout).__getitem__, {})
    with pytest.raises(UsageError, match="another model"):
        Replica.from_checkpoint(Checkpoint.open(tmp_path / "m"), LAYOUT)


def test_an_attached_replica_is_read_only() -> None:
    replica = replica_of(OLD)
    fd = replica.seal_for_readers()
    assert replica.seal_for_readers() == fd
    attached = Replica.attach(os.dup(fd), LAYOUT, replica.hashes.copy())
    assert differing(attached, OLD) == []
    assert attached.root == replica.root
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    with pytest.raises((ValueError, TypeError)):
        attached.write_block(0, block_of(NEW, LAYOUT, 0).tobytes(), hash_of(block_of(NEW, LAYOUT, 0)))
    replica.scatter([replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, NEW)])
    assert differing(attached, NEW) == []  # the owner can still write, and the reader sees the new bits


def test_a_replica_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "replica"
    replica = Replica.create(LAYOUT, path)
    for block in range(LAYOUT.n_blocks):
        data = block_of(OLD, LAYOUT, block)
        replica.write_block(block, data.tobytes(), hash_of(data))
    fd = replica.seal_for_readers()
    attached = Replica.attach(os.dup(fd), LAYOUT, replica.hashes.copy())
    assert differing(attached, OLD) == []
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 0)
    replica.scatter([replica.stage(opened(chunk), chunk.body) for chunk in publish(replica, NEW)])
    assert differing(replica, NEW) == []
    assert differing(Replica.create(LAYOUT, path), OLD) != []  # created again: all zeros
    with pytest.raises(UsageError, match="Cannot keep"):
        Replica.create(LAYOUT, tmp_path / "no" / "folder")


def test_attach_to_another_model_is_refused(tmp_path: Path) -> None:
    fd = os.memfd_create("x")
    os.ftruncate(fd, 100)
    with pytest.raises(PeerError, match=r"replica\.size"):
        Replica.attach(fd, LAYOUT, np.zeros((LAYOUT.n_blocks, 32), np.uint8))
    os.close(fd)


def test_a_reader_never_gets_a_mix() -> None:
    """One thread writes two versions in turn, another reads: every read returns one of the two, never a mix."""
    layout = Layout((TensorSpec("w", "BF16", (1 << 20,)),))
    a = {"w": np.zeros(1 << 20, np.uint16)}
    b = {"w": np.full(1 << 20, 0x3F80, np.uint16)}
    replica = replica_of(a, layout)
    attached = Replica.attach(os.dup(replica.seal_for_readers()), layout, replica.hashes)
    known = {hash_of(a["w"]), hash_of(b["w"])}
    stop = threading.Event()

    def write() -> None:
        there = replica.stage(opened(publish(replica, b)[0]), publish(replica, b)[0].body)
        replica.scatter([there])
        back = replica.stage(opened(publish(replica, a)[0]), publish(replica, a)[0].body)
        replica.scatter([back])
        while not stop.wait(1e-4):  # pause between versions, so that the reader is not starved
            replica.scatter([there])
            stop.wait(1e-4)
            replica.scatter([back])

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for i in range(60):
            data, digest = (replica, attached)[i % 2].read(0)
            found = hash_of(np.frombuffer(data, np.uint8))
            assert found in known
            assert digest in known or i % 2  # the attached replica has a copy of the hashes, which does not follow
            if i % 2 == 0:
                assert digest == found
            seen.add(found)
    finally:
        stop.set()
        writer.join()


def test_a_block_that_is_never_finished_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codec.replica._MAX_READ_TRIES", 3)
    replica = replica_of(OLD)
    with replica._writing(0, bytes(32)), pytest.raises(Torn):
        replica.read_block(0)


def test_a_write_after_an_interrupted_one_is_guarded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codec.replica._MAX_READ_TRIES", 3)
    replica = replica_of(OLD)
    with pytest.raises(KeyError), replica._writing(0, bytes(32)):
        raise KeyError
    with replica._writing(0, hash_of(OLD["a.bias"])), pytest.raises(Torn):
        replica.read_block(0)
    assert replica.read(0) == (OLD["a.bias"].tobytes(), hash_of(OLD["a.bias"]))
