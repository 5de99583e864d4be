"""The position coder: lossless, and malformed bytes are refused."""

import numpy as np
import pytest
from codec_kit import at_least, bits_of, random_bits, rl_step, sprinkled
from hypothesis import given, settings
from hypothesis import strategies as st

from codec import pco
from codec.bits import DTYPES
from codec.errors import PeerError
from codec.layout import BLOCK_ELEMENTS


@pytest.mark.parametrize("name", list(DTYPES))
@pytest.mark.parametrize(("n", "density"), [(1, 1), (65, 0.5), (5000, 0.01), (5000, 1), (5000, 0)])
def test_round_trip(name: str, n: int, density: float) -> None:
    rng, dtype = np.random.default_rng(0), DTYPES[name]
    old = random_bits(rng, n, dtype)
    new = sprinkled(rng, old, density, dtype)
    payload = pco.encode_block(old, new, dtype)
    if payload is None:
        assert np.array_equal(old, new)
        return
    positions, bits = pco.decode_block(payload, old, dtype)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(bits, new[positions])


def test_size_at_one_percent() -> None:
    old, new = rl_step(BLOCK_ELEMENTS)
    payload = pco.encode_block(old, new, DTYPES["BF16"])
    assert payload is not None
    assert 8 * len(payload) / (old != new).sum() < 9.8


@pytest.mark.parametrize("where", ["one row", "everything", "first", "last", "every second"])
def test_clustered_changes(where: str) -> None:
    """Golomb codes suit evenly spread gaps; clustered changes use another mode. Both are lossless."""
    dtype = DTYPES["BF16"]
    old = random_bits(np.random.default_rng(0), 100_000, dtype)
    picked = {
        "one row": slice(40_000, 41_000), "everything": slice(None), "first": slice(0, 1), "last": slice(-1, None),
        "every second": slice(None, None, 2),
    }[where]  # fmt: skip
    new = old.copy()
    new[picked] += np.uint16(1)
    payload = pco.encode_block(old, new, dtype)
    assert payload is not None
    positions, bits = pco.decode_block(payload, old, dtype)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(bits, new[positions])
    assert len(payload) < 20 + 0.6 * positions.size


@settings(max_examples=at_least(60))
@given(st.integers(0, 2**20), st.floats(0.001, 1), st.integers(0, 2**32 - 1))
def test_any_gaps_round_trip(n: int, density: float, seed: int) -> None:
    """Up to a whole block, with every m that such gaps lead to."""
    rng, dtype = np.random.default_rng(seed), DTYPES["U8"]
    old = np.zeros(n, np.uint8)
    new = (rng.random(n) < density**4).astype(np.uint8)
    payload = pco.encode_block(old, new, dtype)
    if payload is None:
        assert not new.any()
        return
    positions, bits = pco.decode_block(payload, old, dtype)
    assert np.array_equal(positions, np.flatnonzero(new))
    assert bits.all()


def test_bad_bytes_are_refused_or_give_other_bits() -> None:
    old, new = rl_step(20_000)
    payload = pco.encode_block(old, new, DTYPES["BF16"])
    assert payload is not None
    rng = np.random.default_rng(1)
    refused = 0
    for i in range(600):
        bad = bytearray(payload)
        if i % 3 == 0:
            bad = bytearray(rng.bytes(int(rng.integers(0, 300))))
        elif i % 3 == 1:
            bad = bad[: int(rng.integers(0, len(bad)))]
        else:
            bad[int(rng.integers(0, len(bad)))] ^= int(rng.integers(1, 256))
        try:
            positions, bits = pco.decode_block(bytes(bad), old, DTYPES["BF16"])
        except PeerError:
            refused += 1
            continue
        assert positions.size == bits.size
        assert positions[-1] < old.size
    assert refused > 400


FIELDS = {
    r"pco\.length": b"",
    r"pco\.count": bits_of((0, 5), (1, 30)),
    r"pco\.count: ": bits_of((21, 5), (0, 60)),  # more than the block
    r"pco\.gaps": bits_of((1, 5), (0, 1), (0, 5), (0, 60)),  # Golomb with m = 0
    r"pco\.gaps: ": bits_of((1, 5), (1, 1), (1, 2), (31, 5), (2**31 - 1, 31), (1, 1), (0, 20)),
    r"pco\.magnitudes": bits_of((1, 5), (1, 1), (0, 2), (0, 1), (1, 2), (31, 5), (2**31 - 1, 31), (1, 1), (0, 8)),
    r"pco\.signs": bits_of((1, 5), (1, 1), (0, 2)),
    r"pco\.padding": bits_of((1, 5), (1, 1), (0, 2), (0, 1), (0, 2), (1, 1), (0, 4)),
    r"pco\.end": bits_of((1, 5), (1, 1), (0, 2), (0, 1), (0, 2), (0, 21)),
}


@pytest.mark.parametrize(("field", "payload"), FIELDS.items(), ids=FIELDS)
def test_the_error_names_the_field(field: str, payload: bytes) -> None:
    with pytest.raises(PeerError, match=field):
        pco.decode_block(payload, np.full(64, 0x3F80, np.uint16), DTYPES["BF16"])
