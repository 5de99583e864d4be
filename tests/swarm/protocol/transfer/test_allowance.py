"""The daily upload limit: exact to the byte, over kills and midnights."""

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.transfer.allowance import Allowance, Record

GB = 10**9
DAY = 20_000


def test_it_saves_before_it_stops_and_the_next_day_starts_at_zero() -> None:
    allowance = Allowance.resume(10 * GB, 200.0, None)
    allowance.look(DAY, 9 * GB)
    assert (allowance.saving, allowance.spent) == (False, False)
    allowance.look(DAY, 10 * GB - 200_000_000)  # eight seconds at full speed are left
    assert (allowance.saving, allowance.spent) == (True, False)
    allowance.look(DAY, 10 * GB - 20_000_000)
    assert (allowance.saving, allowance.spent) == (True, True)
    allowance.look(DAY + 1, 10 * GB)
    assert (allowance.saving, allowance.spent, allowance.left_bytes) == (False, False, 10 * GB - 20_000_000)


def test_a_clock_set_back_a_day_changes_nothing_and_a_wrong_one_recovers() -> None:
    allowance = Allowance.resume(GB, 200.0, Record(DAY, GB))
    allowance.look(DAY - 1, 0)
    assert allowance.spent
    allowance.look(DAY - 400, 0)
    assert not allowance.spent


def test_a_clean_exit_records_the_exact_count() -> None:
    allowance = Allowance.resume(GB, 200.0, None)
    ahead = allowance.look(DAY, 1000)
    assert ahead is not None
    assert ahead.spent_bytes > 1000
    assert allowance.close() == Record(DAY, 1000)


@given(
    limit=st.integers(10**4, 10**10),
    up_mbit=st.floats(0.1, 10_000),
    lives=st.lists(st.lists(st.floats(0.0, 1.0), max_size=30), min_size=1, max_size=6),
)
@settings(max_examples=80)
def test_no_number_of_kills_exceeds_the_limit(limit: int, up_mbit: float, lives: list[list[float]]) -> None:
    """Each run looks five times a second, sends at full speed while it may, and is killed. The record on disk is never
    less than the bytes sent."""
    left = 0
    kept: Record | None = None
    burst = min(int(up_mbit * 125_000 / 5), limit // 50)
    for life in lives:
        allowance, sent = Allowance.resume(limit, up_mbit, kept), 0
        for share in life:
            record = allowance.look(DAY, sent)
            kept = record or kept
            if allowance.spent:
                break
            more = int(share * burst)
            sent += more
            left += more
        assert left <= limit
        assert left <= (kept.spent_bytes if kept is not None else 0)
