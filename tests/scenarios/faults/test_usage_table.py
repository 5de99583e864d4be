"""What a soak measures: means of quarters, and what counts as flat."""

import os
from pathlib import Path

import pytest

from scenarios.faults.usage_table import UsageTable, folder_bytes


def flat(*values: float, quantity: str = "memory") -> bool | None:
    table = UsageTable()
    for value in values:
        table.sample("seed", quantity, value)
    (row,) = table.rows()
    return row["flat"]


def test_growth_from_the_first_to_the_last_quarter_is_seen() -> None:
    mib = 1 << 20
    assert flat(*[100 * mib] * 8)
    assert flat(*[100 * mib] * 6, 104 * mib, 104 * mib)
    assert not flat(*[100 * mib] * 6, 106 * mib, 106 * mib)
    assert flat(*[2 * mib] * 6, 2.5 * mib, 2.5 * mib), "less than a MiB"
    assert flat(300 * mib, *[100 * mib] * 7), "it shrank"
    assert flat(20, 20, 20, 22, quantity="descriptors")
    assert not flat(20, 20, 20, 23, quantity="descriptors")
    assert flat(12, 12, 12, 36, quantity="connections")
    assert not flat(12, 12, 12, 37, quantity="connections")
    assert flat(1 * mib, 1 * mib, 9 * mib, 9 * mib, quantity="book") is None, "it keeps the last 20,000 groups"


def test_processes_and_folders_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "data").write_bytes(bytes(100_000))
    (tmp_path / "ledger.sqlite-wal").write_bytes(bytes(100_000))
    assert 100_000 <= folder_bytes(tmp_path, without=("ledger",)) < 150_000
    assert folder_bytes(tmp_path) >= 200_000
    table = UsageTable()
    table.sample_process("me", os.getpid())
    table.sample_process("nobody", None)
    memory, descriptors, connections = table.rows()
    assert memory["first"] > 1 << 20
    assert descriptors["first"] >= 3
    assert connections["what"] == "connections"
    table.print_rows(table.rows())
    assert "me               memory" in capsys.readouterr().out


def test_what_is_removed_while_it_is_measured_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node removes old versions all the time."""
    for name in ("gone", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_bytes(bytes(100_000))
    scan = os.scandir

    def remove_and_scan(path: str):
        if Path(path).name == "gone":
            (tmp_path / "gone" / "data").unlink()
            (tmp_path / "gone").rmdir()
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", remove_and_scan)
        assert 100_000 <= folder_bytes(tmp_path) < 150_000
    assert not (tmp_path / "gone").exists()


def test_means_of_tenths_show_whether_growth_goes_on() -> None:
    table = UsageTable()
    for value in [*range(10), *[10] * 15]:
        table.sample("seed", "memory", value)
    (row,) = table.rows()
    assert row["tenths"][-5:] == [10.0] * 5
    assert row["tenths"][:3] == [0.5, 3.0, 5.5]
    table = UsageTable()
    table.sample("seed", "memory", 3.0)
    assert table.rows()[0]["tenths"] == [3.0]
