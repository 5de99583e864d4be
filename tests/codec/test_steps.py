"""One delta over T optimizer steps gives the same bits as T deltas in sequence, and is smaller."""

import numpy as np
import pytest
from codec_kit import bf16

from codec.bits import DTYPES
from codec.chunk import CODER_PCO, CODER_RICE, BlockEntry
from codec.staging import decode, encode

STEPS = 32


@pytest.fixture(scope="module")
def walk() -> list[np.ndarray]:
    """bf16 bits of fp32 masters over 32 steps of momentum 0.9, about 1 % of them changing a step."""
    rng = np.random.default_rng(3)
    master = (0.02 * rng.standard_normal(100_000)).astype(np.float32)
    update, found = np.zeros(master.size, np.float32), [bf16(master)]
    for _ in range(STEPS):
        update = np.float32(0.9) * update + np.float32(3e-7) * rng.standard_normal(master.size).astype(np.float32)
        master = master - update
        found.append(bf16(master))
    return found


@pytest.mark.parametrize("coder", [CODER_RICE, CODER_PCO])
def test_one_delta_over_any_number_of_steps(walk: list[np.ndarray], coder: int) -> None:
    dtype, single = DTYPES["BF16"], 0
    for steps in range(1, STEPS + 1):
        step = encode(0, walk[steps - 1], walk[steps], dtype, coder)
        assert step is not None
        single += len(step.payload)
        delta = encode(0, walk[0], walk[steps], dtype, coder)
        assert delta is not None
        entry = BlockEntry(0, delta.coder, delta.new_hash, len(delta.payload))
        decoded = decode(entry, memoryview(delta.payload), walk[0], dtype)
        assert decoded is not None
        words = walk[0].copy()
        words[decoded[0]] = decoded[1]
        assert np.array_equal(words, walk[steps])
        assert len(delta.payload) <= single
    assert len(delta.payload) < 0.5 * single  # an element that changes twice is sent once
