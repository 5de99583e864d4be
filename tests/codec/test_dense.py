"""A block whose elements all change is sent raw without coding it first; one of which half changes is still coded."""

import numpy as np
import pytest

from codec.bits import DTYPES
from codec.chunk import CODER_PCO, CODER_RAW, CODER_RICE
from codec.staging import encode

SIZE = 1 << 18


@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO])
@pytest.mark.parametrize("name", ["U8", "BF16", "F32"])
def test_rewritten_blocks_are_never_coded_whole(monkeypatch: pytest.MonkeyPatch, name: str, coder: int) -> None:
    dtype, random = DTYPES[name], np.random.default_rng(0)
    old, new = (random.integers(0, 1 << 8 * dtype.itemsize, SIZE).astype(dtype.bits) for _ in range(2))
    coded: list[int] = []
    for module in ("rice", "pco"):
        inner = getattr(__import__("codec.staging", fromlist=["x"]), module).encode_changes
        counted = lambda old, new, dtype, inner=inner: (coded.append(new.size), inner(old, new, dtype))[1]  # noqa: E731
        monkeypatch.setattr(f"codec.staging.{module}.encode_changes", counted)
    delta = encode(3, old, new, dtype, coder)
    assert delta is not None
    assert (delta.coder, delta.payload) == (CODER_RAW, new.tobytes())
    assert 0 < sum(coded) <= SIZE // 8


def test_a_half_rewritten_block_is_still_coded() -> None:
    dtype, random = DTYPES["BF16"], np.random.default_rng(0)
    old = random.integers(0, 1 << 16, SIZE).astype(np.uint16)
    new = old.copy()
    new[: SIZE // 2] = random.integers(0, 1 << 16, SIZE // 2)
    delta = encode(0, old, new, dtype)
    assert delta is not None
    assert delta.coder == CODER_RICE
    assert len(delta.payload) < new.nbytes


def test_every_coder_returns_none_for_an_unchanged_block() -> None:
    old = np.arange(SIZE, dtype=np.uint16)
    assert all(
        encode(0, old, old.copy(), DTYPES["BF16"], coder) is None for coder in (CODER_RICE, CODER_PCO, CODER_RAW)
    )


def test_a_first_copy_of_int8_codes_is_about_as_short_as_their_entropy() -> None:
    dtype = DTYPES["I8"]
    codes = np.clip(np.random.default_rng(0).normal(0, 20, 1 << 16).round(), -127, 127).astype(np.int8)
    counts = np.unique(codes, return_counts=True)[1]
    entropy = float(-(counts * np.log2(counts / codes.size)).sum()) / 8
    assert entropy < 7 / 8 * codes.size, "shorter than the changes of a dense step of wider elements may be"
    delta = encode(0, np.zeros(codes.size, np.uint8), codes.view(np.uint8), dtype, new_values=True)
    assert delta is not None
    assert len(delta.payload) < 1.01 * entropy
