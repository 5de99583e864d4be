"""The records' files: SQLite's write-ahead log stays short, whatever is written for however long."""

from pathlib import Path

from swarm.store.disk import Disk
from swarm.store.records import LOG_PAGES, Records

LOG_BYTES = LOG_PAGES * 4096
PAGES_A_WRITE = 4
"""At most, of one small record: the log may be so much longer than where it is copied."""


def log_bytes(path: Path) -> int:
    return path.with_name(f"{path.name}-wal").stat().st_size


def test_the_write_ahead_log_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "swarm.sqlite"
    records, most = Records(path, Disk()), 0
    for number in range(1000):
        records.put([(f"record/{number % 50}", bytes(500))])
        most = max(most, log_bytes(path))
    assert LOG_BYTES // 2 < most < LOG_BYTES + PAGES_A_WRITE * 4200
    records.close()


def test_a_long_write_ahead_log_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "swarm.sqlite"
    records = Records(path, Disk())
    records.put([("manifest", bytes(8 << 20))])
    assert log_bytes(path) > 8 << 20
    for number in range(3):
        records.put([("record", bytes([number]))])
    assert log_bytes(path) <= LOG_BYTES
    assert records.get("manifest") == bytes(8 << 20)
    records.close()
