"""A log file keeps to its size, loses no line at a rotation, and may have several writers."""

import errno
import os
import threading
from pathlib import Path

import pytest

from codec.errors import UsageError
from node.settings import log_file
from node.settings.log_file import OLDER, LogFile


def kept(path: Path) -> list[str]:
    """All lines, the oldest first."""
    files = [path.with_name(f"{path.name}.{number}") for number in range(OLDER, 0, -1)] + [path]
    return [line for file in files if file.exists() for line in file.read_text().splitlines()]


def test_a_full_file_is_renamed_and_few_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "node.log"
    log = LogFile(path, max_bytes=100)
    for number in range(15):
        log.write(f"{number:02} " + "x" * 20)
    assert [line[:2] for line in kept(path)] == [f"{number:02}" for number in range(15)]
    assert path.stat().st_mode & 0o077 == 0
    for number in range(15, 60):
        log.write(f"{number:02} " + "x" * 20)
    assert [line[:2] for line in kept(path)][-1] == "59"
    assert len(list(path.parent.iterdir())) <= OLDER + 1
    log.close()


def test_two_writers_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = LogFile(path, max_bytes=200), LogFile(path, max_bytes=200)
    for number in range(20):
        (first if number % 2 else second).write(f"{number:02} " + "x" * 20)
    assert [line[:2] for line in kept(path)] == [f"{number:02}" for number in range(20)]


def test_a_file_that_somebody_removed_is_made_again(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.write("lost")
    (tmp_path / "log").unlink()
    log.write("here")
    assert (tmp_path / "log").read_text() == "here\n"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--log-file: cannot write"):
        LogFile(tmp_path)


def test_a_failed_opening_loses_lines_and_closes_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    log, other = LogFile(tmp_path / "log"), tmp_path / "other"
    (tmp_path / "log").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(log_file.os, "open", no_more)
        log.write("lost")
    others = [os.open(other, os.O_WRONLY | os.O_CREAT) for _ in range(4)]  # they get the lowest free numbers
    log.write("here")
    log.close()
    log.close()
    log.write("too late")
    for descriptor in others:
        assert os.path.samestat(os.fstat(descriptor), other.stat())
        os.close(descriptor)
    assert (tmp_path / "log").read_text() == "here\n"


def test_a_folder_that_lets_nobody_rename_blocks_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []

    def refused(*names: object) -> None:
        tried.append(names)
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(log_file.os, "replace", refused)
    path = tmp_path / "log"
    writers = LogFile(path, max_bytes=100), LogFile(path, max_bytes=100)

    def write() -> None:
        for number in range(30):
            writers[number % 2].write(f"{number:02} " + "x" * 6)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(30.0)
    assert not thread.is_alive(), "a writer waits for the other's lock"
    assert len(path.read_text().splitlines()) == 30
    assert len(tried) <= 6, "each line tries to rename"
