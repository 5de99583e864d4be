"""The layered replica has, at every version, the same bits as a replica that is written in place."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from codec_kit import LAYOUT, opened, publish, replica_of, stepped, weights

from codec.bits import Bits
from codec.checkpoint import Checkpoint, write_checkpoint
from codec.chunk import CODER_PCO, CODER_RAW, CODER_RICE, BlockEntry, Chunk, ChunkKey
from codec.errors import PeerError
from codec.layered import Layered
from codec.layout import Layout, TensorSpec
from codec.replica import Replica
from codec.staging import Torn

OLD = weights()


class Swarm:
    """The trainer's replica, and the chunks that it published."""

    def __init__(self) -> None:
        self.truth = replica_of(OLD)
        self.bits = OLD
        self.kept: dict[ChunkKey, Chunk] = {}
        self.steps = 0

    def step(self, coder: int = CODER_RICE) -> list[Chunk]:
        self.steps += 1
        self.bits = stepped(self.bits, 0.01, seed=self.steps)
        chunks = publish(self.truth, self.bits, coder=coder, version=self.steps)
        self.kept |= {opened(chunk).key: chunk for chunk in chunks}
        self.truth.scatter([self.truth.stage(opened(chunk), chunk.body) for chunk in chunks])
        return chunks

    def payload(self, key: ChunkKey, block: int) -> tuple[BlockEntry, bytes] | None:
        chunk = self.kept.get(key)
        if chunk is None:
            return None
        header = opened(chunk)
        found = zip(header.blocks, header.payloads(chunk.body), strict=True)
        return next((entry, bytes(payload)) for entry, payload in found if entry.block == block)


@pytest.fixture
def swarm() -> Swarm:
    return Swarm()


def layered_of(swarm: Swarm, folder: Path) -> Layered:
    """A layered replica on a checkpoint of the trainer's current bits."""
    write_checkpoint(folder, LAYOUT, swarm.truth.bits, {})
    return Layered.on(LAYOUT, Checkpoint.open(folder), swarm.truth.hashes.copy(), swarm.payload)


def apply(replica: Layered | Replica, chunks: list[Chunk]) -> None:
    replica.scatter([replica.stage(opened(chunk), chunk.body) for chunk in chunks])


def assert_same(layered: Layered, truth: Replica) -> None:
    assert layered.root == truth.root
    for block in range(LAYOUT.n_blocks):
        assert layered.read(block) == truth.read(block)
        assert np.array_equal(layered.block(block), truth.block(block))
    for tensor in LAYOUT.tensors:
        assert np.array_equal(layered.bits(tensor.name), truth.bits(tensor.name))


def test_the_bits_are_right_at_every_version_with_every_coder(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "v0")
    for coder in (CODER_RICE, CODER_PCO, CODER_RAW, CODER_RICE):
        chunks = swarm.step(coder)
        apply(layered, chunks)
        apply(layered, chunks)  # again: no change
        assert_same(layered, swarm.truth)


def test_chunks_can_be_followed_without_decoding(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "v0")
    for _ in range(3):
        layered.follow([opened(chunk) for chunk in swarm.step()])
    assert_same(layered, swarm.truth)


def test_a_new_checkpoint_replaces_the_chunks_up_to_it(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "v0")
    apply(layered, swarm.step())
    frozen, root = layered.frozen(), swarm.truth.root
    needless = set(swarm.kept)
    apply(layered, swarm.step())
    assert frozen.root == root
    write_checkpoint(tmp_path / "v1", LAYOUT, frozen.parts, {})
    layered.rebase(Checkpoint.open(tmp_path / "v1"), frozen)
    for key in needless:
        del swarm.kept[key]
    apply(layered, swarm.step())
    assert_same(layered, swarm.truth)


def test_a_replica_in_memory_copies_it(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "v0")
    for believed in (False, True):
        apply(layered, swarm.step())
        for replica in (Replica.create(LAYOUT), replica_of(OLD)):
            assert replica.take_from(layered, believed=believed) == ()
            assert replica.root == layered.root
            assert replica.rehash() == []


def damaged(path: Path, how: str) -> None:
    size = path.stat().st_size
    if how == "cut off":
        os.truncate(path, size - 1)
    else:
        with path.open("r+b") as file:
            file.seek(size - 1)
            byte = file.read(1)
            file.seek(size - 1)
            file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("how", ["another bit", "cut off"])
def test_a_damaged_checkpoint_raises_torn(swarm: Swarm, tmp_path: Path, how: str) -> None:
    layered = layered_of(swarm, tmp_path / "v0")
    apply(layered, swarm.step())
    damaged(tmp_path / "v0" / "model.safetensors", how)
    bad = [block for block in range(LAYOUT.n_blocks) if layered.wrong(block)]
    assert len(bad) == 1
    for read in (layered.read, layered.read_block):
        with pytest.raises(Torn) as error:
            read(bad[0])
        assert error.value.blocks == tuple(bad)
    with pytest.raises(Torn):
        layered.bits(LAYOUT.block(bad[0]).name)
    replica = Replica.create(LAYOUT)
    assert replica.take_from(layered) == tuple(bad)
    assert replica.hashes[bad[0]].tobytes() != layered.hashes[bad[0]].tobytes()
    staged = [opened(chunk) for chunk in swarm.step()]
    last = next(header for header in staged if bad[0] in [entry.block for entry in header.blocks])
    with pytest.raises(Torn):
        layered.stage(last, swarm.kept[last.key].body)


def test_a_missing_chunk_raises_torn(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "v0")
    apply(layered, swarm.step())
    swarm.kept.clear()
    with pytest.raises(Torn):
        layered.read(0)


def test_a_checkpoint_of_another_model_is_refused(swarm: Swarm, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", LAYOUT, OLD.__getitem__, {})
    checkpoint, hashes = Checkpoint.open(tmp_path / "m"), np.zeros((1, 32), np.uint8)
    with pytest.raises(PeerError, match=r"a\.bias"):
        Layered.on(Layout((TensorSpec("a.bias", "F32", (36,)),)), checkpoint, hashes, swarm.payload)
    with pytest.raises(KeyError):
        Layered.on(Layout((TensorSpec("z", "F32", (37,)),)), checkpoint, hashes, swarm.payload)


def test_a_reader_never_gets_a_mix(swarm: Swarm, tmp_path: Path) -> None:
    """While versions and checkpoints are added, every block that is read is of one version."""
    layered = layered_of(swarm, tmp_path / "v0")
    block = LAYOUT.blocks_of("b.weight")[0]
    allowed, over, failed = {layered.read(block)}, threading.Event(), list[object]()
    reads: list[tuple[bytes, bytes]] = []

    def read() -> None:
        try:
            reads.append(layered.read(block))
            while not over.is_set():
                reads.append(layered.read(block))
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 5):
        apply(layered, swarm.step())
        allowed.add(swarm.truth.read(block))
        if version % 2 == 0:
            frozen = layered.frozen()
            write_checkpoint(tmp_path / f"v{version}", LAYOUT, frozen.parts, {})
            layered.rebase(Checkpoint.open(tmp_path / f"v{version}"), frozen)
            swarm.kept.clear()
    over.set()
    reader.join()
    assert not failed
    assert set(reads) <= allowed


class Engine:
    """The memory of an engine at some version. `at_once`: blocks of one read; 0: it cannot be read."""

    def __init__(self, bits: Replica, at_once: int = 3) -> None:
        self.bits, self.at_once = bits, at_once
        self.asked: list[tuple[int, ...]] = []
        self.right = self.other = 0

    def read(self, blocks: Sequence[int]) -> list[Bits]:
        self.asked.append(tuple(blocks))
        return [self.bits.block(block).copy() for block in blocks[: self.at_once]]

    def count(self, *, right: bool) -> None:
        self.right, self.other = self.right + right, self.other + (not right)


def copy_of(replica: Replica) -> Replica:
    copy = Replica.create(LAYOUT)
    for block in range(LAYOUT.n_blocks):
        copy.write_block(block, *replica.read(block))
    return copy


def unreadable(layered: Layered, swarm: Swarm) -> None:
    """Have the disk return nothing any more; the chunks stay."""
    for block in range(LAYOUT.n_blocks):
        layered._blocks[block] = layered._blocks[block]._replace(base=Layered(LAYOUT, swarm.payload)._blocks[0].base)


@pytest.mark.parametrize("behind", [0, 1, 3])
@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO, CODER_RAW])
def test_an_engine_at_an_older_version_is_brought_forward(
    swarm: Swarm, tmp_path: Path, behind: int, coder: int
) -> None:
    layered = layered_of(swarm, tmp_path / "base")
    engine = Engine(copy_of(swarm.truth))
    for number in range(4):
        apply(layered, swarm.step(coder))
        if number == 3 - behind:
            engine.bits = copy_of(swarm.truth)
    layered.live = engine
    unreadable(layered, swarm)
    for block in range(LAYOUT.n_blocks):
        assert layered.read_block(block) == swarm.truth.read_block(block)
    for tensor in LAYOUT.tensors:
        np.testing.assert_array_equal(layered.bits(tensor.name), swarm.truth.bits(tensor.name))
    apply(layered, swarm.step(coder))
    assert layered.root == swarm.truth.root
    assert engine.other == 0
    assert max(map(len, engine.asked)) > 1, "several blocks are read at once"


def test_what_the_engine_has_wrong_or_cannot_give_is_read_from_disk(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "base")
    engine = layered.live = Engine(copy_of(swarm.truth))
    apply(layered, swarm.step())
    largest = max(range(LAYOUT.n_blocks), key=lambda block: LAYOUT.block(block).nbytes)  # a small one is sent raw
    engine.bits._bytes[LAYOUT.block(largest).offset] ^= 1
    assert layered.read_block(largest) == swarm.truth.read_block(largest)
    assert (engine.right > 0, engine.other) == (True, 1)
    apply(layered, swarm.step())
    assert engine.other == 2
    engine.at_once = 0
    engine.asked.clear()
    assert [bits.tobytes() for bits in layered.parts(LAYOUT.tensors[0].name)]
    assert len(engine.asked) == 1, "an engine that cannot be read is not asked for each block"
    assert layered.root == swarm.truth.root


def test_damage_is_found_where_neither_has_the_bits(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "base")
    engine = layered.live = Engine(copy_of(swarm.truth))
    unreadable(layered, swarm)
    assert layered.read_block(0) == swarm.truth.read_block(0)
    with pytest.raises(Torn):
        layered.read(0)  # only the disk proves what is on disk
    engine.bits._bytes[LAYOUT.block(0).offset] ^= 1
    with pytest.raises(Torn):
        layered.read_block(0)
    assert layered.wrong(0)


def test_a_snapshot_stays_at_its_version_while_the_engine_goes_on(swarm: Swarm, tmp_path: Path) -> None:
    layered = layered_of(swarm, tmp_path / "base")
    engine = layered.live = Engine(copy_of(swarm.truth))
    apply(layered, swarm.step())
    then, frozen = copy_of(swarm.truth), layered.frozen()
    apply(layered, swarm.step())
    engine.bits = copy_of(swarm.truth)
    for block in range(LAYOUT.n_blocks):
        assert frozen.read_block(block) == then.read_block(block)
        assert layered.read_block(block) == swarm.truth.read_block(block)
