import pytest

from swarm.transport.parallel import WAYS, socket_window_bytes, ways

MIB = 1 << 20


@pytest.mark.parametrize(
    ("round_trip_s", "window_bytes", "expected"),
    [
        (0.0, 3 * MIB, 1),  # not measured yet
        (0.0002, 64 * 1024, 1),  # loopback and datacentre: one, however small the buffers
        (0.05, 3 * MIB, 4),
        (0.1, 3 * MIB, 8),  # the common 6 MiB buffers
        (0.1, 16 * MIB, 4),
        (0.03, 16 * MIB, 1),
        (0.3, 3 * MIB, 8),  # never more
    ],
)
def test_ways(round_trip_s: float, window_bytes: int, expected: int) -> None:
    assert ways(round_trip_s, window_bytes) == expected


def test_longer_never_takes_fewer() -> None:
    counts = [ways(ms / 1000, 3 * MIB) for ms in range(400)]
    assert counts == sorted(counts)
    assert set(counts) == set(WAYS)


def test_this_machine_has_a_window() -> None:
    assert 4096 < socket_window_bytes() < 1 << 34
