"""The coder of new values: lossless, small, the same as the specification says, and malformed bytes are refused."""

import time
from pathlib import Path

import numpy as np
import pytest
from codec_kit import at_least, bf16, random_bits, rl_step, sprinkled
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_decoder import DTYPES as PLAIN
from plain_decoder import Model

from codec import values
from codec.bits import DTYPES, Bits, DType
from codec.chunk import CODER_RAW, CODER_RICE, BlockEntry
from codec.errors import PeerError
from codec.layout import BLOCK_ELEMENTS, Layout, TensorSpec
from codec.replica import Replica
from codec.staging import block_hash, decode, encode, encode_changes, forward, raw_bits

BF16 = DTYPES["BF16"]
GOLDEN = Path(__file__).parent / "golden"
CODED = [name for name, dtype in DTYPES.items() if dtype.itemsize < 8]


def fresh(rng: np.random.Generator, n: int, dtype: DType, kind: str) -> Bits:
    """New bits of a block: of weights, of few values, of zeros with values between, of one value, random."""
    if kind == "weights" and dtype.name in ("BF16", "F32"):
        wide = (0.02 * rng.standard_normal(n)).astype(np.float32)
        return bf16(wide) if dtype is BF16 else wide.view(np.uint32)
    if kind == "random":
        return random_bits(rng, n, dtype)
    if kind == "one value":
        return np.full(n, 0x5A, dtype.bits)
    some = random_bits(rng, 4, dtype)
    found = some[rng.choice(4, n, p=[0.7, 0.2, 0.06, 0.04])]
    if kind == "zeros between":
        found[(np.arange(n) // 300) % 3 > 0] = 0
    return found


KINDS = ("weights", "few values", "zeros between", "one value", "random")


def coded(old: Bits, new: Bits, dtype: DType) -> bytes | None:
    """The payload, if values are coded; they decode to the new bits, also onto the new bits."""
    payload = values.encode_block(old, new, dtype)
    if payload is not None:
        assert len(payload) < new.nbytes
        for before in (old, new):
            copy = before.copy()
            values.decode_onto(payload, copy, dtype)
            assert np.array_equal(copy, new)
    return payload


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 3, 64, 5000, 40_003])
def test_round_trip(name: str, kind: str, n: int) -> None:
    rng, dtype = np.random.default_rng(0), DTYPES[name]
    payload = coded(np.zeros(n, dtype.bits), fresh(rng, n, dtype, kind), dtype)
    assert (payload is not None) >= (n >= 5000 and kind not in ("random", "weights"))


@settings(max_examples=at_least(60))
@given(
    st.sampled_from(CODED), st.sampled_from(KINDS), st.integers(1, 70_000), st.floats(0, 1), st.integers(0, 2**32 - 1)
)
def test_any_new_values_round_trip(name: str, kind: str, n: int, density: float, seed: int) -> None:
    rng, dtype = np.random.default_rng(seed), DTYPES[name]
    old = fresh(rng, n, dtype, "few values")
    kept = np.repeat(rng.random(-(-n // 100)) > density, 100)[:n]
    coded(old, np.where(kept, old, fresh(rng, n, dtype, kind)), dtype)


@pytest.mark.parametrize("name", [name for name in CODED if name in PLAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_decoder_reads_it(name: str, kind: str) -> None:
    rng, dtype = np.random.default_rng(5), DTYPES[name]
    old = fresh(rng, 10_001, dtype, "few values")
    new = np.where((np.arange(old.size) // 500) % 3 == 1, old, fresh(rng, old.size, dtype, kind))
    payload = coded(old, new, dtype)
    if payload is not None:
        model = Model([], bytes(32), [old.tolist()], [name])
        model.decode(0, CODER_RAW, payload)
        assert model.blocks[0] == new.tolist()


def test_every_mode_is_written() -> None:
    """So the tests above compare every mode of planes and form of tables with the plain decoder."""
    rng, modes, forms = np.random.default_rng(0), set[int](), set[int]()
    wide = np.where(rng.random(20_000) < 0.5, 0x3F000000, 0x40000000) | rng.integers(0, 1 << 16, 20_000)
    noise = 0x3F00 | rng.integers(0, 1 << 7, 20_000) | rng.integers(0, 2, 20_000) << 15
    mixed = np.where(rng.random(20_000) < 0.5, noise, 0x4011)
    samples = (("F32", wide), ("F32", wide & ~0xFF), ("BF16", mixed))
    for name, new in ((name, new.astype(DTYPES[name].bits)) for name, new in samples):
        payload = coded(np.zeros_like(new), new, DTYPES[name])
        assert payload is not None
        model = Model([], bytes(32), [[0] * new.size], [name])
        model.decode(0, CODER_RAW, payload)
        assert model.blocks[0] == new.tolist()
        modes |= model.planes
        forms |= model.tables
    assert modes == {0, 1, 2, 3}
    assert forms == {0, 1, 2}


def test_weights_take_their_exponents_entropy_and_the_other_bits() -> None:
    new = bf16(0.02 * np.random.default_rng(0).standard_normal(BLOCK_ELEMENTS).astype(np.float32))
    exponents = np.bincount(new >> 7 & 0xFF)
    share = exponents[exponents > 0] / new.size
    entropy = 8 - float(share @ np.log2(share))
    payload = coded(np.zeros_like(new), new, BF16)
    assert payload is not None
    assert 8 * len(payload) / new.size < 1.002 * entropy


def test_zeros_between_new_values_cost_next_to_nothing() -> None:
    new = np.zeros(BLOCK_ELEMENTS, np.uint16)
    payload = coded(new, new + np.uint16(3) * (np.arange(new.size) // 5000 % 10 == 0).astype(np.uint16), BF16)
    assert payload is not None
    assert len(payload) < 300


def test_elements_of_eight_bytes_are_not_coded() -> None:
    old = np.zeros(100, np.uint64)
    assert values.encode_block(old, old + np.uint64(1), DTYPES["I64"]) is None
    with pytest.raises(PeerError, match=r"values\.length"):
        values.decode_onto(bytes(50), old, DTYPES["I64"])


def test_nothing_changed_is_no_payload() -> None:
    old = np.arange(100, dtype=np.uint16)
    assert values.encode_block(old, old.copy(), BF16) is None


def test_a_block_is_coded_so_only_where_it_may_be_and_where_it_is_shorter() -> None:
    rng = np.random.default_rng(0)
    new = bf16(0.02 * rng.standard_normal(100_000).astype(np.float32))
    old = np.zeros_like(new)
    plain, delta = encode(0, old, new, BF16), encode(0, old, new, BF16, new_values=True)
    assert plain is not None
    assert delta is not None
    assert (plain.coder, len(plain.payload)) == (CODER_RAW, new.nbytes)
    assert delta.coder == CODER_RAW
    assert len(delta.payload) < 0.7 * new.nbytes
    before, after = rl_step(100_000)
    step = encode(0, before, after, BF16, new_values=True)
    assert step is not None
    assert step.coder == CODER_RICE


def test_the_first_step_of_a_matrix_of_zeros() -> None:
    """Half of the block keeps its values; the other half was zeros, and becomes plus or minus about the same."""
    rng = np.random.default_rng(0)
    old = bf16(rng.uniform(-0.05, 0.05, 200_000).astype(np.float32))
    old[(np.arange(old.size) // 10_000) % 2 == 1] = 0
    new = np.where(old == 0, np.where(rng.random(old.size) < 0.5, 0x38D1, 0xB8D1), old).astype(np.uint16)
    encoded = encode_changes(0, old, new, BF16, new_values=True)
    assert encoded is not None
    assert encoded.changed == 100_000
    assert encoded.delta.coder == CODER_RAW
    assert 8 * len(encoded.delta.payload) < 1.1 * encoded.changed
    entry = BlockEntry(0, CODER_RAW, encoded.delta.new_hash, len(encoded.delta.payload))
    found = decode(entry, memoryview(encoded.delta.payload), old, BF16)
    assert found is not None
    positions, bits = found
    copy = old.copy()
    copy[positions] = bits
    assert np.array_equal(copy, new)
    forward(entry, bytes(encoded.delta.payload), old_copy := old.copy(), BF16)
    assert np.array_equal(old_copy, new)
    assert np.array_equal(raw_bits(encoded.delta.payload, old, BF16), new)


def test_other_old_bits_are_found_by_the_hash() -> None:
    rng = np.random.default_rng(0)
    old = np.zeros(20_000, np.uint16)
    new = sprinkled(rng, old, 0, BF16)
    new[5000:9000] = 7
    payload = values.encode_block(old, new, BF16)
    assert payload is not None
    entry = BlockEntry(0, CODER_RAW, block_hash(new), len(payload))
    assert decode(entry, memoryview(payload), old, BF16) is not None
    assert decode(entry, memoryview(payload), old + np.uint16(1), BF16) is None


@pytest.mark.parametrize("others", [False, True])
def test_the_base_is_coded_so_in_a_layout_with_other_parts(others: bool) -> None:
    more = (TensorSpec("~_draft/w", "BF16", (5000,)),) if others else ()
    replica = Replica.create(Layout((TensorSpec("w", "BF16", (5000,)), *more)))
    new = fresh(np.random.default_rng(0), 5000, BF16, "few values")
    delta = replica.encode_block(0, new)
    assert delta is not None
    assert delta.coder == (CODER_RAW if others else CODER_RICE)
    if others:
        replica.base_values = False
        there, here = replica.encode_block(1, new), replica.encode_block(0, new)
        assert there is not None
        assert here is not None
        assert (there.coder, here.coder) == (CODER_RAW, CODER_RICE)
        assert len(there.payload) == len(delta.payload) < len(here.payload)


def bits(*fields: tuple[int, int]) -> bytes:
    """(value, width) fields, least significant bit first."""
    word = at = 0
    for value, width in fields:
        word |= value << at
        at += width
    return word.to_bytes(-(-at // 8), "little")


RUN = ((13, 8), (1, 5), (0, 2), (0, 2))
"""Segments of 2^13, one run, of one element, at the start."""

FIELDS = {
    r"values\.length": b"",
    r"values\.length: ": bytes(128),
    r"values\.segment": bits((21, 8), (0, 30)),
    r"values\.segment: ": bits((12, 8), (0, 30)),
    r"values\.runs": bits((13, 8), (0, 30)),
    r"values\.runs: none": bits((13, 8), (21, 5), (0, 60)),
    r"values\.kept": bits((13, 8), (1, 5), (1, 2), (31, 5)),
    r"values\.sizes": bits((13, 8), (1, 5), (0, 2), (1, 2), (31, 5)),
    r"values\.runs: beyond": bits((13, 8), (1, 5), (1, 2), (6, 5), (0, 6), (2, 2), (0, 2), (0, 30)),
    r"values\.mode": bits(*RUN, (2, 2), (0, 30)),
    r"values\.byte": bits(*RUN, (3, 2), (0, 4)),
    r"values\.bytes": bits(*RUN, (0, 2), (0, 13)),
    r"values\.padding": bits(*RUN, (0, 2), (1, 13), (0, 40)),
    r"values\.table": bits(*RUN, (1, 2), (3, 2), (0, 200)),
    r"values\.table: ": bits(*RUN, (1, 2), (2, 2), (0, 200)),  # frequencies that add up to 0
    r"values\.stream": bits(*RUN, (1, 2), (0, 2), (0, 200)),  # states below 2^16
    r"values\.context": bits(*RUN, (3, 2), (7, 8), (2, 2), (2, 4), (5, 8), (5, 8), (0, 200)),
    r"values\.end": bits(*RUN, (3, 2), (7, 8), (3, 2), (8, 8), (0, 20)),
    r"values\.padding: ": bits(*RUN, (3, 2), (7, 8), (3, 2), (8, 8), (1, 3)),
}


@pytest.mark.parametrize(("field", "payload"), FIELDS.items(), ids=FIELDS)
def test_the_error_names_the_field(field: str, payload: bytes) -> None:
    copy = np.zeros(64, np.uint16)
    with pytest.raises(PeerError, match=field):
        values.decode_onto(payload, copy, BF16)
    assert not copy.any()


@pytest.mark.parametrize("name", ["BF16", "F32"])
def test_golden_bytes(name: str) -> None:
    """Frozen bytes must always decode. An encoder may choose other tables, so the bytes that it writes are not frozen:
    it compares logarithms, which differ in their last bit between machines."""
    old, new = np.load(GOLDEN / f"values.{name}.npy")
    payload = (GOLDEN / f"values.{name}").read_bytes()
    copy = old.copy()
    values.decode_onto(payload, copy, DTYPES[name])
    assert np.array_equal(copy, new)
    model = Model([], bytes(32), [old.tolist()], [name])
    model.decode(0, CODER_RAW, payload)
    assert model.blocks[0] == new.tolist()


def test_a_million_runs_take_no_time() -> None:
    """Ten bytes may name as many runs as a block has elements."""
    n = BLOCK_ELEMENTS - 8
    payload = bits((13, 8), (20, 5), (n - (1 << 19), 19), (0, 2), (0, 2), *((3, 2), (7, 8)) * (2 * 128))
    copy = np.zeros(BLOCK_ELEMENTS, np.uint16)
    began = time.thread_time()
    values.decode_onto(payload, copy, BF16)
    assert time.thread_time() - began < 0.5
    assert np.all(copy[:n] == 0x8383)
    assert not copy[n:].any()


def test_a_stream_that_is_cut_off_is_refused() -> None:
    new = bf16(0.02 * np.random.default_rng(0).standard_normal(3000).astype(np.float32))
    payload = values.encode_block(np.zeros_like(new), new, BF16)
    assert payload is not None
    for size in range(len(payload)):
        with pytest.raises(PeerError, match=r"^values\."):
            values.decode_onto(payload[:size], np.zeros_like(new), BF16)
