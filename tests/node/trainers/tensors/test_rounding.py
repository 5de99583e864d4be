"""A file's bits are converted to another dtype exactly as torch converts tensors."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from codec.errors import UsageError  # noqa: E402
from node.trainers.tensors.rounding import bring, can_bring  # noqa: E402

KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def floats(seed: int) -> np.ndarray:
    """Bits of float32 values: half of them ordinary, half of any exponent, and the special ones."""
    random = np.random.default_rng(seed)
    ordinary = random.normal(0, 0.05, 20_000).astype(np.float32).view(np.uint32)
    edges = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x3F80FFFF, 1, 0x477FE000], np.uint32)
    return np.concatenate([ordinary, random.integers(0, 1 << 32, 20_000, np.uint32), edges])


@pytest.mark.parametrize("wanted", ["BF16", "F16"])
def test_masters_are_rounded(wanted: str) -> None:
    bits = floats(1)
    values = bits.view(np.float32)
    if wanted == "F16":
        bits = bits[(np.abs(values) < 65_000) | ~np.isfinite(values)]
    theirs = torch.from_numpy(bits.view(np.float32).copy()).to(KINDS[wanted])
    mine = torch.from_numpy(bring("x", bits, "F32", wanted).view(np.int16).copy()).view(KINDS[wanted])
    numbers = ~theirs.isnan()
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine[numbers].view(torch.int16), theirs[numbers].view(torch.int16))


@pytest.mark.parametrize("found", ["BF16", "F16"])
def test_halves_are_widened(found: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    theirs = torch.from_numpy(bits.view(np.int16)).view(KINDS[found]).float()
    mine = torch.from_numpy(bring("x", bits, found, "F32").view(np.float32).copy())
    numbers = ~theirs.isnan()
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(mine[numbers].view(torch.int32), theirs[numbers].view(torch.int32))


def test_overflow_and_unknown_pairs_are_refused() -> None:
    with pytest.raises(UsageError, match="65,504"):
        bring("x", np.array([70_000.0], np.float32).view(np.uint32), "F32", "F16")
    assert not can_bring("BF16", "F16")
    assert not can_bring("F16", "BF16")
    assert can_bring("I64", "I64")
    assert not can_bring("I64", "F32")
