"""Slow links and many cores: rice. Fast links and few cores: pco."""

import pytest

from codec.choice import choose_coder
from codec.chunk import CODER_PCO, CODER_RICE

FULL, CHANGED = 16_400_000_000, 82_000_000


@pytest.mark.parametrize(
    ("down_mbit", "cores", "coder"),
    [
        (50, 1, CODER_RICE),
        (100, 1, CODER_RICE),
        (150, 1, CODER_PCO),
        (10_000, 1, CODER_PCO),
        (400, 4, CODER_RICE),
        (1000, 4, CODER_PCO),
        (1000, 16, CODER_RICE),
    ],
)
def test_choice(down_mbit: float, cores: int, coder: int) -> None:
    assert choose_coder(FULL, CHANGED, down_mbit, cores) == coder


def test_nothing_changed() -> None:
    assert choose_coder(FULL, 0, 1, 64) in (CODER_RICE, CODER_PCO)
