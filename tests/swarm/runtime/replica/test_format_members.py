"""Members of a swarm with formats: what bf16 members compute for others, what a member of a format gives its engine."""

from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from codec import FileSpec, Layout, Replica, StagedBlock, StagedChunk, TensorSpec, state_root
from codec.errors import UsageError
from codec.formats.dequantised import DequantisedBase
from codec.formats.packed import PackedBase
from codec.formats.part import FormatPart, reader_of
from codec.formats.share import FormatShare
from codec.formats.spec import FORMATS, format_tensors
from codec.parts import extended
from codec.sign import Key
from codec.staging import block_hash
from swarm.protocol.core.events import VersionId
from swarm.runtime.replica.dequantised import DequantisedReplica
from swarm.runtime.replica.format_blocks import FormatBlocks
from swarm.runtime.replica.holding import Holding
from swarm.runtime.replica.model import Model
from swarm.store import Store

FORM = FORMATS["int4-group-e8"]
BASE = Layout(
    (
        TensorSpec("a.embed_tokens.weight", "BF16", (64, 64), ("lm_head.weight",)),
        TensorSpec("a.norm.weight", "BF16", (64,)),
        TensorSpec("b.up_proj.weight", "BF16", (1100, 1003)),
        TensorSpec("c.down_proj.weight", "BF16", (200, 300)),
    )
)
NORM = 1
"""The block of the norm, which stays bf16."""
WHOLE = extended(BASE, formats=format_tensors(BASE, FORM))
CONFIG = b'{"architectures": ["Qwen3ForCausalLM"]}'
FIRST, SECOND = VersionId(0, 0), VersionId(0, 1)


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path, Key(bytes(32)).public) as opened:
        yield opened


def whole_replica(seed: int = 0) -> Replica:
    """All bits of a version, as the seed has them."""
    return replica_of(WHOLE, seed)


def replica_of(layout: Layout, seed: int) -> Replica:
    """Random bits of the base of `layout`, and its format."""
    replica, rng = Replica.create(layout), np.random.default_rng(seed)
    for block in range(layout.base_blocks):
        values = (rng.standard_normal(layout.block(block).count) * 0.02).astype(np.float32)
        write(replica, block, (values.view(np.uint32) >> 16).astype(np.uint16))
    part, read = FormatPart(layout, FORM), reader_of(replica)
    for tensor in part.tensors:
        for found in part.compute(tensor, read):
            write(replica, found.block, found.new)
    return replica


def write(replica: Replica, block: int, bits: np.ndarray) -> None:
    replica.write_block(block, bits.tobytes(), block_hash(bits))


def member(store: Store, truth: Replica, holding: Holding) -> Model:
    """A member that holds what `holding` says, of the version that `truth` is."""
    model = Model(store, holding=holding)
    replica = Replica.create(WHOLE, held=holding.blocks(WHOLE))
    for block in range(WHOLE.n_blocks):
        if replica.holds(block):
            replica.write_block(block, truth.read_block(block), truth.hashes[block].tobytes())
    replica.note_hashes((block, truth.hashes[block].tobytes()) for block in range(WHOLE.n_blocks))
    model.adopt(replica, FIRST)
    assert replica.root == truth.root
    return model


def format_blocks() -> range:
    return range(WHOLE.base_blocks, WHOLE.n_blocks)


def test_a_bf16_member_gives_every_block_of_the_format(store: Store) -> None:
    truth = whole_replica()
    model = member(store, truth, Holding())
    blocks = FormatBlocks(model)
    for block in format_blocks():
        assert model.read_block(block) is None
        assert blocks.read_block(block) == (FIRST, truth.read_block(block))
    assert blocks.read_block(0) == (FIRST, truth.read_block(0))
    assert blocks.read_block(WHOLE.n_blocks) is None


def test_a_block_that_cannot_be_proven_is_not_given(store: Store) -> None:
    truth = whole_replica()
    model = member(store, truth, Holding())
    assert isinstance(model.replica, Replica)
    place = WHOLE.blocks_of("b.up_proj.weight")[0]
    model.replica._writable(place)[7] ^= 0x4000
    blocks = FormatBlocks(model)
    wrong = WHOLE.blocks_of(f"~format/{FORM.name}/b.up_proj.weight/codes")[0]
    assert blocks.read_block(wrong) is None
    right = WHOLE.blocks_of(f"~format/{FORM.name}/c.down_proj.weight/codes")[0]
    assert blocks.read_block(right) == (FIRST, truth.read_block(right))
    model.version = None
    assert blocks.read_block(right) is None


def test_a_member_of_a_format_computes_nothing(store: Store) -> None:
    truth = whole_replica()
    blocks = FormatBlocks(member(store, truth, Holding(FormatShare(FORM.name))))
    held = FormatShare(FORM.name).blocks(WHOLE)
    for block in range(WHOLE.n_blocks):
        assert (blocks.read_block(block) is not None) == held[block]


def test_what_each_holds() -> None:
    share = Holding(FormatShare(FORM.name))
    assert set(share.all(WHOLE)) == {NORM, *format_blocks()}
    assert set(Holding().all(WHOLE)) == set(range(BASE.n_blocks))
    assert Holding(formats=True).blocks(WHOLE) is None
    assert share.nbytes(WHOLE) < 0.3 * Holding().nbytes(WHOLE)
    assert Holding(formats=True).nbytes(WHOLE) > Holding().nbytes(WHOLE) + 0.9 * share.nbytes(WHOLE)
    assert Holding(formats=True).nbytes(BASE) == Holding().nbytes(BASE) == BASE.base_nbytes
    with pytest.raises(UsageError, match="keeps its replica in memory"):
        share.check_place(WHOLE, on_disk=True)
    Holding().check_place(BASE, on_disk=True)


def test_an_engine_follows_what_the_codes_stand_for(store: Store) -> None:
    truth = whole_replica()
    model = member(store, truth, Holding(FormatShare(FORM.name)))
    engine = DequantisedReplica(model, store, FORM.name)
    loan = engine.lend()
    assert loan is not None
    assert (loan.layout, loan.version, loan.swarm_root) == (BASE, FIRST, truth.root)
    base = DequantisedBase(WHOLE, FORM)
    live = [base.block(block, reader_of(truth)).copy() for block in range(BASE.n_blocks)]
    assert loan.root == root_of(live)

    later = whole_replica(seed=1)
    staged = [staged_block(truth, later, block) for block in (NORM, *format_blocks())]
    assert isinstance(model.replica, Replica)
    for change in staged:
        model.replica.write_block(change.block, later.read_block(change.block), change.new_hash)
    model.version = SECOND
    found = engine.changes(SECOND, [StagedChunk(tuple(staged))])
    assert found is not None
    for chunk in found.changes:
        for change in chunk:
            assert block_hash(live[change.block]) == change.old_hash
            live[change.block][change.positions] = change.bits
            assert block_hash(live[change.block]) == change.new_hash
    assert found.root == root_of(live)
    assert found.root == root_of([base.block(block, reader_of(later)) for block in range(BASE.n_blocks)])

    # Changes that are told late, or twice, are not believed: the engine is filled again.
    assert engine.changes(SECOND, [StagedChunk(tuple(staged))]) is None
    assert engine.changes(VersionId(0, 3), [StagedChunk(tuple(staged))]) is None
    engine.end_loan()
    again = engine.lend()
    assert again is not None
    assert (again.root, again.version) == (found.root, SECOND)


def test_an_engine_follows_the_packed_codes(store: Store) -> None:
    store.put_file(CONFIG)
    config = FileSpec("config.json", len(CONFIG), blake3(CONFIG).digest())
    base = Layout(
        (TensorSpec("b.up_proj.weight", "BF16", (64, 256)), TensorSpec("d.norm.weight", "BF16", (256,))), (config,)
    )
    layout = extended(base, formats=format_tensors(base, FORM))
    first, later = (replica_of(layout, seed) for seed in (0, 1))
    model = Model(store, holding=Holding(formats=True))
    model.adopt(first, FIRST)
    engine = DequantisedReplica(model, store, FORM.name, packed=True)
    loan = engine.lend()
    assert loan is not None
    packed = PackedBase(layout, FORM, CONFIG)
    assert loan.layout == engine.layout == packed.layout
    assert engine.files == packed.files
    live = [packed.block(block, reader_of(first)).copy() for block in range(packed.layout.n_blocks)]
    assert loan.root == root_of(live, packed.layout)

    staged = [staged_block(first, later, block) for block in range(layout.n_blocks)]
    for change in staged:
        first.write_block(change.block, later.read_block(change.block), change.new_hash)
    model.version = SECOND
    found = engine.changes(SECOND, [StagedChunk(tuple(staged))])
    assert found is not None
    for change in (change for chunk in found.changes for change in chunk):
        live[change.block][change.positions] = change.bits
    assert found.root == root_of(live, packed.layout)
    assert found.root == root_of(
        [packed.block(block, reader_of(later)) for block in range(packed.layout.n_blocks)], packed.layout
    )


def test_a_model_without_a_config_cannot_be_packed(store: Store) -> None:
    model = member(store, whole_replica(), Holding(FormatShare(FORM.name)))
    with pytest.raises(UsageError, match=r"has no config\.json"):
        DequantisedReplica(model, store, FORM.name, packed=True).lend()


def staged_block(old: Replica, new: Replica, block: int) -> StagedBlock:
    before, after = old.block(block), new.block(block)
    positions = np.flatnonzero(before != after).astype(np.uint32)
    hashes = (old.hashes[block].tobytes(), new.hashes[block].tobytes())
    return StagedBlock(block, positions, after[positions].copy(), *hashes)


def root_of(blocks: list[np.ndarray], layout: Layout = BASE) -> bytes:
    hashes = np.frombuffer(b"".join(map(block_hash, blocks)), np.uint8).reshape(-1, 32)
    return state_root(layout.hash, hashes)
