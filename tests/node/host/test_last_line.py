"""The last line of a log."""

from pathlib import Path

from node.host.last_line import last_line


def test_the_last_line_that_is_not_empty_of_what_this_process_wrote(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"an earlier process\n")
    start = log.stat().st_size
    assert (last_line(log), last_line(log, start)) == ("an earlier process", "")
    with log.open("ab") as file:
        file.write(b"x" * 10_000 + b"\nthe end: \xff \n\n")
    assert last_line(log, start) == "the end: \N{REPLACEMENT CHARACTER}"
