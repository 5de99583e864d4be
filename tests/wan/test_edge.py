"""One edge over an emulated long path, in short form of `scenarios.emulator.transport_wan`."""

from dataclasses import replace

import pytest

from scenarios.emulator.transport_wan import ROWS, measure

pytestmark = [pytest.mark.wan, pytest.mark.alone]


def test_a_long_fat_path_gets_several_connections_and_control_stays_quick() -> None:
    row = measure(replace(ROWS["gigabit"], mbit=500, seconds=4))
    assert row["ways"] == (4 if row["congestion"] == "bbr" else 8)
    assert row["share_after"] > 0.5
    assert row["control_p95_ms"] < 500
    assert (
        4 <= row["first_byte_round_trips"] < 6
    )  # four round trips, and the CPU time of the handshake on a slow machine


def test_a_lossy_path_is_used() -> None:
    row = measure(replace(ROWS["loss"], mbit=50, seconds=6))
    assert row["share_after"] > 0.4


@pytest.mark.long
def test_an_edge_that_was_idle_is_measured_against_a_warm_one() -> None:
    row = measure(replace(ROWS["idle"], idle_s=3))
    assert row["cold_s"] < 3
    assert row["x_warm"] == pytest.approx(row["cold_s"] / sorted(row["warm_s"][1:])[1], abs=0.01)
