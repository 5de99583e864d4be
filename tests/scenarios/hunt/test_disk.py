"""The virtual disk: what a power failure leaves, and what SQLite's files say of what is durable."""

import os
import random
import sqlite3
from pathlib import Path

import pytest

from scenarios.hunt.disk import FaultyDisk, VirtualDisk
from scenarios.hunt.sqlite_files import installed
from swarm.store.disk import DiskFull


def disk_of(folder: Path) -> VirtualDisk:
    folder.mkdir()
    disk = VirtualDisk(folder)
    disk.settle()
    return disk


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


@pytest.mark.parametrize("seed", range(20))
def test_what_was_synced_is_there_after_a_power_failure(tmp_path: Path, seed: int) -> None:
    disk = disk_of(tmp_path / "home")
    write(disk.folder / "a", b"a" * 10_000)
    disk.synced(disk.folder / "a")
    disk.synced(disk.folder)
    disk.cut_power(random.Random(seed))
    assert (disk.folder / "a").read_bytes() == b"a" * 10_000


def test_what_was_not_synced_is_there_or_lost_or_torn(tmp_path: Path) -> None:
    found: set[str] = set()
    for seed in range(60):
        disk = disk_of(tmp_path / str(seed))
        write(disk.folder / "a", b"a" * 10_000)
        disk.synced(disk.folder / "a")
        disk.synced(disk.folder)
        write(disk.folder / "a", b"b" * 10_000)
        write(disk.folder / "new", b"n")
        disk.cut_power(random.Random(seed))
        data = (disk.folder / "a").read_bytes()
        found.add("old" if data == b"a" * 10_000 else "new" if data == b"b" * 10_000 else "mixed")
        found.add("kept" if (disk.folder / "new").exists() else "gone")
        assert set(data) <= set(b"ab")
    assert found == {"old", "new", "mixed", "kept", "gone"}


def test_a_name_is_durable_when_its_folder_was_synced(tmp_path: Path) -> None:
    outcomes: set[bytes] = set()
    for seed in range(40):
        disk = disk_of(tmp_path / str(seed))
        for name, data in (("place", b"old"), ("place.tmp", b"new")):
            write(disk.folder / name, data)
            disk.synced(disk.folder / name)
        disk.synced(disk.folder)
        os.replace(disk.folder / "place.tmp", disk.folder / "place")
        disk.cut_power(random.Random(seed))
        outcomes.add((disk.folder / "place").read_bytes())
    assert outcomes == {b"old", b"new"}


def test_a_sync_that_lies_makes_nothing_durable(tmp_path: Path) -> None:
    disk = disk_of(tmp_path / "home")
    disk.lies = True
    write(disk.folder / "a", b"a")
    disk.synced(disk.folder / "a")
    disk.synced(disk.folder)
    assert not disk.syncs


def test_a_copy_after_a_cut_leaves_the_disk_as_it_is(tmp_path: Path) -> None:
    disk = disk_of(tmp_path / "home")
    write(disk.folder / "a", b"a")
    disk.synced(disk.folder / "a")
    disk.synced(disk.folder)
    write(disk.folder / "new", b"n")
    found: set[bool] = set()
    for seed in range(20):
        copy = tmp_path / str(seed)
        disk.copy_after_cut(random.Random(seed), copy)
        assert (copy / "a").read_bytes() == b"a"
        found.add((copy / "new").exists())
    assert found == {True, False}
    assert (disk.folder / "new").read_bytes() == b"n"


def test_a_full_disk_refuses_writes_as_the_store_expects(tmp_path: Path) -> None:
    disk = disk_of(tmp_path / "home")
    disk.full = True
    with pytest.raises(DiskFull):
        FaultyDisk(disk).write_whole(disk.folder / "a", b"a")
    disk.full = False
    FaultyDisk(disk).write_whole(disk.folder / "a", b"a")


def test_a_bit_that_rots_is_one_bit_and_the_times_stay(tmp_path: Path) -> None:
    disk = disk_of(tmp_path / "home")
    write(disk.folder / "a", bytes(100))
    changed = (disk.folder / "a").stat().st_mtime_ns
    assert disk.rot(random.Random(1)) == "a"
    assert sum(byte.bit_count() for byte in (disk.folder / "a").read_bytes()) == 1
    assert (disk.folder / "a").stat().st_mtime_ns == changed


class Log:
    """Notes what SQLite does, and refuses what it was told to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.verdict = ""

    def refuses(self, what: str, path: Path) -> str:
        self.lines.append(f"{what} {path.name}")
        return self.verdict if what == "write" else ""

    def synced(self, path: Path) -> None:
        self.lines.append(f"synced {path.name}")


def opened(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("pragma journal_mode=wal")
    database.execute("pragma synchronous=full")
    database.execute("create table if not exists numbers (number integer)")
    return database


def test_a_commit_writes_and_syncs_the_log(tmp_path: Path) -> None:
    log = Log()
    with installed(log, tmp_path):
        database = opened(tmp_path / "a.sqlite")
        log.lines.clear()
        database.execute("insert into numbers values (1)")
        assert "write a.sqlite-wal" in log.lines
        assert log.lines[-1] == "synced a.sqlite-wal"
        database.execute("pragma synchronous=off")
        log.lines.clear()
        database.execute("insert into numbers values (2)")
        assert not [line for line in log.lines if line.startswith("synced")]
        database.close()


def test_several_databases_stay_apart(tmp_path: Path) -> None:
    with installed(Log(), tmp_path):
        databases = [opened(tmp_path / f"{number}.sqlite") for number in range(4)]
        for _ in range(3):
            for number, database in enumerate(databases):
                database.execute("insert into numbers values (?)", (number,))
        for number, database in enumerate(databases):
            assert database.execute("select number from numbers").fetchall() == [(number,)] * 3
            database.close()


@pytest.mark.parametrize(("verdict", "says"), [("full", "full"), ("gone", "I/O")])
def test_a_refused_write_is_sqlites_error(tmp_path: Path, verdict: str, says: str) -> None:
    log = Log()
    with installed(log, tmp_path):
        database = opened(tmp_path / "a.sqlite")
        database.execute("insert into numbers values (1)")
        log.verdict = verdict
        with pytest.raises(sqlite3.OperationalError, match=says):
            database.execute("insert into numbers values (2)")
        log.verdict = ""
        database.close()
    with sqlite3.connect(tmp_path / "a.sqlite") as after:
        assert after.execute("select number from numbers").fetchall() == [(1,)]
    after.close()


def test_afterwards_sqlite_is_as_it_was(tmp_path: Path) -> None:
    log = Log()
    with installed(log, tmp_path):
        pass
    log.lines.clear()
    opened(tmp_path / "b.sqlite").close()
    assert not log.lines
