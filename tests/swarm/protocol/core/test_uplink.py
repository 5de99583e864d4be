"""The estimate of queued bytes: those handed over, less those that an uplink of this rate has sent since."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.protocol.core.uplink import CAREFUL_SHARE, Uplink


def test_bytes_handed_over_leave_at_the_rate() -> None:
    uplink = Uplink(lambda: 1000.0)
    uplink.take(600, 10.0)
    uplink.take(400, 10.0)
    assert [uplink.queued_bytes(10.0 + s) for s in (0.0, 0.25, 1.0, 9.0)] == [1000.0, 750.0, 0.0, 0.0]


def test_idle_time_is_not_saved_up() -> None:
    uplink = Uplink(lambda: 1000.0)
    uplink.take(100, 0.0)
    uplink.take(500, 60.0)
    assert uplink.queued_bytes(60.0) == 500.0


def test_a_careful_estimate_assumes_a_lower_rate() -> None:
    careful = True
    uplink = Uplink(lambda: 1000.0, lambda: careful)
    uplink.take(1000, 0.0)
    assert uplink.queued_bytes(1.0) == pytest.approx(1000 * (1 - CAREFUL_SHARE))
    careful = False
    assert uplink.queued_bytes(1.0) == 0.0


def test_nothing_is_queued_while_the_rate_is_unknown() -> None:
    rate = 0.0
    uplink = Uplink(lambda: rate)
    uplink.take(1000, 0.0)
    rate = 1.0
    assert uplink.queued_bytes(0.0) == 1000.0
    rate = 0.0
    assert uplink.queued_bytes(0.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 10)), max_size=20), st.floats(1, 1e9))
def test_the_queue_is_never_negative_nor_more_than_was_handed_over(steps: list[tuple[int, float]], rate: float) -> None:
    uplink, now, total = Uplink(lambda: rate), 0.0, 0
    for size, wait_s in steps:
        uplink.take(size, now)
        total += size
        now += wait_s
        assert 0.0 <= uplink.queued_bytes(now) <= total
