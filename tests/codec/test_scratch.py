"""The memory that a coder reuses for each block: how much of it is really used."""

from pathlib import Path

import numpy as np
import pytest

from codec import rice
from codec.bits import DTYPES
from codec.layout import BLOCK_ELEMENTS
from codec.scratch import Scratch

BF16 = DTYPES["BF16"]
MOST_BYTES = 16 << 20
"""A block with 1 % of its elements changed has 80 KB of gaps and differences, in thirty-two rows."""


def _anonymous_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return 1024 * int(fields["RssAnon"].split()[0])


def test_a_few_changes_in_every_class_use_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With huge pages each class's row would use 2 MiB for its first number."""
    old = (np.arange(BLOCK_ELEMENTS) % 16 * 128 + 0x3F00).astype(np.uint16)  # sixteen exponents
    new = old ^ (np.arange(BLOCK_ELEMENTS) % 101 == 0).astype(np.uint16)
    rice.encode_changes(old, new, BF16)  # the kernels are loaded
    monkeypatch.setattr(Scratch, "_free", [])
    before = _anonymous_bytes()
    assert rice.encode_changes(old, new, BF16) is not None
    assert len(Scratch._free) == 1
    assert _anonymous_bytes() - before < MOST_BYTES
