"""A version's changes, divided for an engine; and the copies of adapter slots that follow them."""

import os

import numpy as np
import pytest

from codec import Layout, Replica, StagedBlock, StagedChunk, TensorSpec
from codec.adapter import AdapterConfig, AdapterModule, AdapterSlots
from codec.manifest import state_root
from codec.parts import BASE, DRAFT, Part, base_layout, draft_blocks, extended, part_layout, part_root, policy_part
from codec.staging import block_hash
from node.engines.adapters import map_weights, slot_root
from node.ledger.part_history import Change
from node.member.changed_parts import ChangedParts
from node.member.slot_bits import SlotBits

MODEL = Layout(tuple(TensorSpec(f"layers.{i}.proj.weight", "BF16", (1024, 1536)) for i in range(2)))
LAYOUT = extended(MODEL, AdapterSlots.reserve(MODEL, 3, 512))
SLOT = part_layout(LAYOUT, Part.adapter(1))


def config(version: int = 1) -> AdapterConfig:
    return AdapterConfig("math", MODEL.hash, 4, 8.0, (AdapterModule("layers.0.proj", 4),), {}, version)


def change(replica: Replica, block: int, new: np.ndarray | None = None) -> StagedBlock:
    old = replica.block(block).copy()
    if new is None:
        new = old ^ np.ones((), old.dtype)
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return StagedBlock(block, positions, new[positions], replica.hashes[block].tobytes(), block_hash(new))


@pytest.fixture
def replica() -> Replica:
    replica = Replica.create(LAYOUT)
    for block in range(LAYOUT.base_blocks):
        bits = np.zeros(LAYOUT.block(block).count, np.uint16)
        replica.write_block(block, bits.tobytes(), block_hash(bits))
    return replica


def write_adapter(replica: Replica, version: int = 1) -> None:
    data = np.frombuffer(config(version).to_bytes(), np.uint8)
    blocks = [change(replica, SLOT.first, data), change(replica, SLOT.first + 1)]
    replica.scatter([StagedChunk(tuple(blocks))])


def test_an_engine_gets_the_changes_of_the_base_and_its_root(replica: Replica) -> None:
    divided = ChangedParts(LAYOUT, replica.hashes)
    mixed = StagedChunk((change(replica, 1), change(replica, SLOT.first + 1)))
    alone = StagedChunk((change(replica, 2),))
    found = divided.divide([mixed, alone])
    replica.scatter([mixed, alone])
    assert [[block.block for block in chunk] for chunk in found.base] == [[1], [2]]
    assert found.base[1] is alone
    assert found.base_root == part_root(LAYOUT, replica.hashes, BASE)
    assert found.parts == {BASE, Part.adapter(1)}
    assert np.array_equal(found.hashes, replica.hashes)


def test_a_version_of_an_adapter_changes_nothing_of_the_base(replica: Replica) -> None:
    divided = ChangedParts(LAYOUT, replica.hashes)
    before = part_root(LAYOUT, replica.hashes, BASE)
    found = divided.divide([StagedChunk((change(replica, SLOT.first + 2),))])
    assert (found.base, found.base_root, found.parts) == ((), before, {Part.adapter(1)})
    assert divided.everything().parts == {BASE, *map(Part.adapter, range(3))}
    assert divided.everything().base == ()


def test_a_slot_is_copied_as_the_engine_is_to_have_it(replica: Replica) -> None:
    write_adapter(replica)
    slots = SlotBits(LAYOUT)
    empty, full = slots.copy(replica, [0, 1], replica.hashes)
    assert (empty.slot, empty.config, empty.fd) == (0, None, None)
    assert (full.slot, full.config) == (1, config())
    assert full.fd is not None
    weights = map_weights(full.fd)
    assert weights[: 1 << 20].all()
    assert not weights[1 << 20 :].any()
    assert full.root == part_root(LAYOUT, replica.hashes, Part.adapter(1))
    assert full.root == slot_root(1, config().to_bytes(), weights)
    os.close(full.fd)


def test_a_slot_that_a_later_version_changed_is_left_to_that_version(replica: Replica) -> None:
    wanted = replica.hashes.copy()
    write_adapter(replica)
    assert [update.slot for update in SlotBits(LAYOUT).copy(replica, [0, 1, 2], wanted)] == [0, 2]


def test_a_change_names_adapters_that_came_and_went(replica: Replica) -> None:
    slots = SlotBits(LAYOUT)
    write_adapter(replica, 7)
    (update,) = slots.copy(replica, [1], replica.hashes)
    assert slots.change(frozenset({Part.adapter(1)}), [update]) == Change(False, frozenset({"math"}), {"math": 7})
    assert slots.change(frozenset({BASE}), []) == Change(True, frozenset(), {"math": 7})
    gone = update._replace(config=None, fd=None)
    assert slots.change(frozenset({Part.adapter(1)}), [gone]) == Change(False, frozenset({"math"}), {})
    assert update.fd is not None
    os.close(update.fd)


def test_a_slot_with_an_invalid_configuration_counts_as_empty(replica: Replica) -> None:
    replica.scatter([StagedChunk((change(replica, SLOT.first),))])
    (update,) = SlotBits(LAYOUT).copy(replica, [1], replica.hashes)
    assert update.config is None


def test_a_model_without_slots_has_none() -> None:
    assert not SlotBits(base_layout(LAYOUT)).all


def test_an_engine_that_loads_the_draft_gets_its_changes_too() -> None:
    head = Layout((TensorSpec("fc.weight", "BF16", (64, 64)),))
    layout = extended(MODEL, AdapterSlots.reserve(MODEL, 1, 16), head)
    replica = Replica.create(layout)
    first = draft_blocks(layout).start
    with_draft = ChangedParts(layout, replica.hashes, drafted=True)
    without = ChangedParts(layout, replica.hashes)
    staged = StagedChunk((change(replica, first),))
    found, other = with_draft.divide([staged]), without.divide([staged])
    replica.scatter([staged])
    policy = policy_part(layout).layout
    assert with_draft.base == policy
    assert found.base == (staged,)
    assert found.base_root == state_root(policy.hash, replica.hashes[: policy.n_blocks])
    assert found.parts == other.parts == {DRAFT}
    assert other.base == ()
    assert other.base_root == part_root(layout, replica.hashes, BASE)
