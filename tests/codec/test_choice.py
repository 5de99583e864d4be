"""The choice of a coder: rice for slow links and many cores, pco for fast links and few cores."""

import pytest

from codec.choice import arrival_mbit, choose_coder
from codec.chunk import CODER_PCO, CODER_RICE

FULL, CHANGED = 16_400_000_000, 82_000_000


@pytest.mark.parametrize(
    ("link_mbit", "cores", "coder"),
    [
        (0, 4, CODER_RICE),
        (50, 1, CODER_RICE),
        (215, 1, CODER_RICE),
        (225, 1, CODER_PCO),
        (10_000, 1, CODER_PCO),
        (870, 4, CODER_RICE),
        (890, 4, CODER_PCO),
        (1000, 16, CODER_RICE),
    ],
)
def test_the_choice_by_link_and_cores(link_mbit: float, cores: int, coder: int) -> None:
    assert choose_coder(FULL, CHANGED, link_mbit, cores) == coder


def test_the_arrival_rate_is_bounded_by_all_uplinks_together_and_by_the_seeds() -> None:
    assert arrival_mbit(100, []) == 100
    assert arrival_mbit(100, [100, 100]) == 100
    assert arrival_mbit(100, [0, 0, 0, 0]) == 25
    assert arrival_mbit(1000, [100] * 9) == pytest.approx(1900 / 9)


def test_the_slowest_downlink_bounds_the_arrival_rate() -> None:
    assert arrival_mbit(1000, [1000, 1000], [1000, 30, 500]) == 30
    assert arrival_mbit(100, [1000, 1000], [1000, 300]) == 100


def test_the_choice_without_changes() -> None:
    assert choose_coder(FULL, 0, 1, 64) in (CODER_RICE, CODER_PCO)
