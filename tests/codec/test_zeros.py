"""Blocks of zeros beyond the base are holes: of memory, of checkpoints, and of what a replica on disk reads."""

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from codec import Checkpoint, Layout, Replica, TensorSpec, shared, write_checkpoint
from codec.adapter import AdapterSlots
from codec.checkpoint import PARTS_FILE
from codec.layered import Layered
from codec.parts import Part, base_layout, extended, part_layout
from codec.staging import StagedBlock, StagedChunk, block_hash
from codec.zeros import are_zeros, with_holes, zero_hash, zero_hashes
from swarm.store.disk import Disk

BASE = Layout(tuple(TensorSpec(f"layers.{i}.proj.weight", "BF16", (512, 512)) for i in range(3)))
LAYOUT = extended(BASE, AdapterSlots.reserve(BASE, 64, 256))
"""64 slots of 1.5 MiB each beside a base of 1.5 MiB."""
SLOT = part_layout(LAYOUT, Part.adapter(3))
BLOCK = SLOT.first + 1
"""The first block of the weights of slot 3."""


def write_all(path: Path, parts: object) -> None:
    Disk().write_file(path, parts)  # type: ignore[arg-type]


def allocated(replica: Replica) -> int:
    assert replica.fd is not None
    assert replica._slots is not None
    return sum(os.fstat(fd).st_blocks * 512 for fd in (replica.fd, replica._slots.fd))


def change(replica: Replica, block: int, every: int = 3) -> StagedBlock:
    old = replica.block(block)
    positions = np.arange(0, old.size, every, dtype=np.uint32)
    new = old.copy()
    new[positions] += 1
    return StagedBlock(block, positions, new[positions], replica.hashes[block].tobytes(), block_hash(new))


@pytest.fixture
def replica() -> Replica:
    replica = Replica.create(LAYOUT)
    rng = np.random.default_rng(1)
    for block in range(LAYOUT.base_blocks):
        bits = rng.integers(0, 1 << 16, LAYOUT.block(block).count, np.uint16)
        replica.write_block(block, bits.tobytes(), block_hash(bits))
    return replica


def test_the_hashes_of_new_parts_are_those_of_their_bits() -> None:
    fresh = Replica.create(LAYOUT)
    assert not fresh.hashes[: LAYOUT.base_blocks].any()
    assert np.array_equal(fresh.hashes[LAYOUT.base_blocks :], zero_hashes(LAYOUT))
    wrong = fresh.rehash()
    assert wrong == list(range(LAYOUT.base_blocks)), "all others had the hashes of their bits"


def test_the_base_alone_has_no_blocks_beyond_it() -> None:
    assert BASE.base_blocks == BASE.n_blocks == LAYOUT.base_blocks
    assert not are_zeros(BASE, 0, zero_hash(BASE.block(0).nbytes))
    assert are_zeros(LAYOUT, BLOCK, zero_hash(LAYOUT.block(BLOCK).nbytes))
    assert not are_zeros(LAYOUT, BLOCK, bytes(32))


def test_empty_slots_take_no_memory(replica: Replica, tmp_path: Path) -> None:
    base = allocated(replica)
    assert base < LAYOUT.nbytes / 30
    for block in range(LAYOUT.n_blocks):  # as for peers, audits and proofs
        data, digest = replica.read(block)
        assert block_hash(np.frombuffer(data, np.uint8)) == digest
    write_checkpoint(
        tmp_path / "1",
        LAYOUT,
        lambda name: replica.bits(name) if name < "~" else with_holes(LAYOUT, replica.hashes, name, replica.block),
        {},
        write_file=write_all,
    )
    assert allocated(replica) == base
    second = Replica.from_checkpoint(Checkpoint.open(tmp_path / "1", parts=True), LAYOUT)
    assert second.root == replica.root
    assert allocated(second) <= base


def emptied(replica: Replica, block: int) -> StagedBlock:
    old = replica.block(block)
    positions = np.flatnonzero(old).astype(np.uint32)
    digest = zero_hash(old.nbytes)
    return StagedBlock(block, positions, np.zeros(positions.size, old.dtype), replica.hashes[block].tobytes(), digest)


def test_an_emptied_slot_gives_its_memory_back_while_others_have_it_mapped(replica: Replica) -> None:
    before = allocated(replica)
    base_fd, slot_fd = replica.seal_for_readers(), replica.seal_for_readers(SLOT.offset)
    blocks = range(SLOT.first, SLOT.first + SLOT.layout.n_blocks)
    for block in blocks:
        replica.scatter([StagedChunk((change(replica, block),))])
    full = allocated(replica)
    assert full > before + SLOT.layout.nbytes - 4 * 4096
    reader = Replica.attach(os.dup(slot_fd), SLOT.layout, replica.hashes[blocks.start : blocks.stop], SLOT.offset)
    assert np.array_equal(reader.block(1), replica.block(BLOCK))
    neighbour = part_layout(LAYOUT, Part.adapter(4)).first
    replica.scatter([StagedChunk((change(replica, neighbour),))])
    kept = replica.block(neighbour).copy()
    for block in blocks:
        replica.scatter([StagedChunk((emptied(replica, block),))])
    assert allocated(replica) < before + 4 * 4096 + kept.nbytes + 4096
    assert np.array_equal(replica.block(neighbour), kept), "the slot beside it"
    assert not reader.block(1).any(), "a process that has it mapped reads zeros"
    assert not replica.block(BLOCK).any()
    assert np.array_equal(replica.hashes[blocks.start : blocks.stop], zero_hashes(LAYOUT)[: len(blocks)])
    replica.scatter([StagedChunk((change(replica, BLOCK),))])
    assert np.array_equal(reader.block(1), replica.block(BLOCK)), "the next adapter in the slot"
    for fd in (base_fd, slot_fd):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)


def test_without_proc_the_slots_are_sealed_as_the_base_is(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "reopen_readonly", lambda fd: os.open("/nowhere", os.O_RDONLY))
    fd = replica.seal_for_readers(SLOT.offset)
    with pytest.raises(PermissionError):
        mmap.mmap(fd, 4096)
    replica.scatter([StagedChunk((change(replica, BLOCK),))])
    replica.scatter([StagedChunk((emptied(replica, BLOCK),))])
    assert not replica.block(BLOCK).any()
    assert replica.rehash() == []


@pytest.mark.parametrize("write", [None, write_all])
def test_a_checkpoint_keeps_slots_in_a_sparse_file_that_no_library_loads(
    replica: Replica, tmp_path: Path, write: Callable[..., None] | None
) -> None:
    replica.scatter([StagedChunk((change(replica, BLOCK),))])
    folder = tmp_path / "checkpoint"
    write_checkpoint(
        folder, LAYOUT, lambda name: with_holes(LAYOUT, replica.hashes, name, replica.block), {}, write_file=write
    )
    stored = folder / PARTS_FILE
    assert stored.stat().st_size > LAYOUT.nbytes - BASE.nbytes
    assert stored.stat().st_blocks * 512 < 2 * LAYOUT.block(BLOCK).nbytes + (1 << 18)
    assert Checkpoint.open(folder).layout == base_layout(LAYOUT)
    assert Replica.from_checkpoint(Checkpoint.open(folder, parts=True), LAYOUT).root == replica.root


def test_a_replica_on_disk_reads_zeros_without_files(replica: Replica, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", BASE, replica.bits, {})
    layered = Layered.on(LAYOUT, Checkpoint.open(tmp_path / "base"), replica.hashes.copy(), lambda *_: None)
    assert layered.root == replica.root
    assert not layered.block(BLOCK).any()
    assert not any(layered.wrong(block) for block in range(LAYOUT.n_blocks))
    assert Layered(LAYOUT, lambda *_: None).hashes[BLOCK].tobytes() == replica.hashes[BLOCK].tobytes()


def test_a_replica_takes_a_slot_that_became_zeros_again(replica: Replica, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base", BASE, replica.bits, {})
    empty = Layered.on(LAYOUT, Checkpoint.open(tmp_path / "base"), replica.hashes.copy(), lambda *_: None)
    replica.scatter([StagedChunk((change(replica, BLOCK),))])
    assert replica.take_from(empty) == ()
    assert replica.root == empty.root
    assert not replica.block(BLOCK).any()
