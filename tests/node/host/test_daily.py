"""The count of a day's bytes: on disk before they leave, kept across restarts, and an error when it is unreadable."""

from pathlib import Path

import msgspec
import pytest

from codec.errors import UsageError
from node.host.daily import Daily
from swarm.protocol.core.events import LocalBudget
from swarm.protocol.transfer.allowance import Record

NOON = 20_000 * 86_400 + 43_200


def test_the_budget_is_reported_once_survives_a_restart_and_resets_at_midnight(tmp_path: Path) -> None:
    sent, now = [0], [float(NOON)]

    def daily() -> Daily:
        return Daily(tmp_path, 1.0, 100.0, lambda: sent[0], lambda: now[0])

    first = daily()
    assert first.look() is None
    assert (first.spent, first.news) == (False, "")
    sent[0] = 995_000_000
    assert first.look() == LocalBudget(saving=True, spent=True)
    assert first.look() is None
    assert "1 GB" in first.news
    kept = msgspec.json.decode((tmp_path / "uplink-today.json").read_bytes(), type=Record)
    assert kept.spent_bytes >= 995_000_000
    sent[0] = 0  # killed, started again
    second = daily()
    assert second.look() == LocalBudget(saving=True, spent=True)
    now[0] += 43_200
    assert second.look() == LocalBudget(saving=False, spent=False)
    second.close()
    assert daily().status().spent_bytes == 0


def test_a_count_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "uplink-today.json").write_bytes(b"{")
    with pytest.raises(UsageError, match="Remove the file"):
        Daily(tmp_path, 1.0, 100.0, lambda: 0)
