"""How many connections a path needs."""

import pytest

from swarm.transport.parallel import CONNECTION_COUNTS, socket_window_bytes, target_connections

MB = 1_000_000


@pytest.mark.parametrize(
    ("round_trip_s", "window_bytes", "mbit", "expected"),
    [
        (0.0, 3 * MB, 1000, 1),  # not measured yet
        (0.0002, 64 * 1024, 1000, 1),  # loopback and datacentre: one, however small the buffers
        (0.05, 3 * MB, 1000, 4),
        (0.1, 3 * MB, 1000, 8),  # common buffers, a gigabit
        (0.1, 3 * MB, 200, 1),  # an uplink that one connection fills
        (0.2, 3 * MB, 200, 2),
        (0.1, 20 * MB, 1000, 1),
        (0.3, 3 * MB, 1000, 8),  # never more
    ],
)
def test_target_connections(round_trip_s: float, window_bytes: int, mbit: float, expected: int) -> None:
    assert target_connections(round_trip_s, window_bytes, mbit, True) == expected


def test_many_connections_where_losses_halve_the_rate() -> None:
    assert target_connections(0.1, 30 * MB, 50, False) == CONNECTION_COUNTS[-1]
    assert target_connections(0.01, 30 * MB, 50, False) == 1


def test_a_longer_path_never_takes_fewer() -> None:
    counts = [target_connections(ms / 1000, 3 * MB, 1000, True) for ms in range(400)]
    assert counts == sorted(counts)
    assert set(counts) == set(CONNECTION_COUNTS)


def test_this_machine_has_a_window() -> None:
    assert 4096 < socket_window_bytes() < 1 << 34
