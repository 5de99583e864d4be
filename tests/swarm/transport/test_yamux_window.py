"""The accounting of yamux windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import PeerError
from swarm.transport.yamux.frames import INITIAL_WINDOW_BYTES
from swarm.transport.yamux.window import ReceiveWindow, SendWindow, WindowBudget

FIRST, MOST = 1 << 20, 16 << 20


def test_send_credit_has_an_end() -> None:
    window = SendWindow()
    window.add_credit(2**32 - 1 - INITIAL_WINDOW_BYTES)
    with pytest.raises(PeerError, match="increment"):
        window.add_credit(1)


def test_one_byte_too_many() -> None:
    window = ReceiveWindow(WindowBudget(0), FIRST, MOST)
    assert window.first_increment == 0
    window.spend(INITIAL_WINDOW_BYTES)
    with pytest.raises(PeerError, match="past a window"):
        window.spend(1)


def test_it_doubles_for_a_fast_reader_only() -> None:
    for round_trip_s, step_s, grown in ((0.1, 0.01, True), (0.0, 0.001, True), (0.001, 0.5, False)):
        window = ReceiveWindow(WindowBudget(64 << 20), FIRST, MOST)
        for step in range(200):
            window.spend(FIRST // 4)
            window.note_read(FIRST // 4, step * step_s, round_trip_s)
        assert (window.size == MOST) is grown
        assert (window.size == FIRST) is not grown


@given(st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 0.1)), max_size=60), st.integers(0, 8 << 20))
def test_credit_never_exceeds_the_window_and_never_runs_dry(steps: list[tuple[int, float]], budget: int) -> None:
    """With a sender that spends its credit and a reader that reads everything, both ends count the same credit."""
    pool = WindowBudget(budget)
    window = ReceiveWindow(pool, FIRST, MOST)
    peer_has = INITIAL_WINDOW_BYTES + window.first_increment
    now_s = 0.0
    for wanted, pause_s in steps:
        length = min(wanted, peer_has)
        now_s += pause_s
        window.spend(length)
        peer_has += window.note_read(length, now_s, 0.02) - length
        assert peer_has == window.credit
        assert window.size // 2 <= peer_has <= window.size <= INITIAL_WINDOW_BYTES + budget
    window.release()
    assert pool.take(1 << 40) == budget
