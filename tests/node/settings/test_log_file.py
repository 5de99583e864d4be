"""A log file keeps to its size, loses no line at a rotation, and may have several writers."""

from pathlib import Path

import pytest

from codec.errors import UsageError
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
